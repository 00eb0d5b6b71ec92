"""Opens HTML reports in a headless Chromium: no console message, no request, no sideways scroll, light, dark, printed.

    python -m tests.pages [--out build/pages] [PAGE.html ...]

Without pages it makes its own: a run with all that a report can hold, and one whose every text is hostile. The pictures
of each are left in --out, to be looked at. Needs chromium in PATH, or its path in CHROMIUM.
"""

import argparse
import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ("--headless=new", "--disable-gpu", "--no-first-run", "--disable-extensions", "--remote-debugging-pipe")
WIDTHS = (400, 1400)
SCHEMES = ("light", "dark")
LEAST_PX = 9.0  # text of a picture that is smaller cannot be read on a phone
MOST_PX = 15_000  # height of a picture: a page may be longer
# Width of the page and of what it is shown in; whatever is wider than its page; size of the smallest text of a picture.
MEASURE = """(() => {
  const page = document.documentElement;
  const texts = [...document.querySelectorAll('figure svg text')];
  const scale = (text) => text.ownerSVGElement.getBoundingClientRect().width / 400;
  const sizes = texts.map((text) => parseFloat(getComputedStyle(text).fontSize) * scale(text)).filter((px) => px > 0);
  const outside = texts.filter((text) => {
    const box = text.getBoundingClientRect();
    return box.width && (box.right > innerWidth + 1 || box.left < -1);
  });
  return {scroll: page.scrollWidth, inner: innerWidth, least: Math.min(...sizes, 99), height: page.scrollHeight,
          outside: outside.map((text) => text.textContent), hacked: String(window.hacked),
          images: document.querySelectorAll('img, iframe, object, embed, link').length};
})()"""
# Sorting by the last column of figures: falling, rising, as it was.
SORT = """(() => {
  const table = document.querySelector('table.figures');
  const head = [...table.tHead.rows[0].cells].at(-1);
  const order = () => [...table.tBodies[0].rows].map((row) => row.cells[row.cells.length - 1].dataset.sort ?? null);
  const found = [order()];
  for (let click = 0; click < 3; click++) { head.querySelector('button')?.click(); found.push(order()); }
  return found;
})()"""


class Browser:
    """One Chromium, spoken to through a pipe in the DevTools protocol: JSON, a zero byte after each message."""

    def __init__(self, profile: Path) -> None:
        to_child, self._out = os.pipe()
        self._in, from_child = os.pipe()
        high = [os.dup(fd) for fd in (to_child, from_child)]

        def hand_over() -> None:
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        command = [_browser(), *FLAGS, *root, f"--user-data-dir={profile}", "about:blank"]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(command, preexec_fn=hand_over, pass_fds=(3, 4), stdout=quiet, stderr=quiet)
        for fd in (to_child, from_child, *high):
            os.close(fd)
        self._numbers, self._rest, self._session = count(1), b"", ""
        self.events: list[dict[str, Any]] = []
        targets = self("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session = self("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]

    def __call__(self, method: str, **params: Any) -> dict[str, Any]:
        number = self._send(method, params)
        while True:
            message = self._message()
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return dict(message["result"])
            self.events.append(message)

    def _send(self, method: str, params: dict[str, Any]) -> int:
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        os.write(self._out, json.dumps({"id": number, "method": method, "params": params} | session).encode() + b"\0")
        return number

    def go(self, url: str) -> None:
        """Load a page, without what was heard before; returns when it has loaded."""
        self.events.clear()
        self("Page.navigate", url=url)
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self._message())

    def value(self, expression: str) -> Any:
        return self("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._in, 1 << 20)
            if not more:
                raise RuntimeError("the browser has gone")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        message = dict(json.loads(line))
        if message.get("method") == "Page.javascriptDialogOpening":  # a page stands still until it is answered
            self._send("Page.handleJavaScriptDialog", {"accept": True})
        return message


def _browser() -> str:
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        sys.exit(f"no browser: install one of {', '.join(BROWSERS)}, or give its path in CHROMIUM")
    return found


@contextmanager
def browser() -> Iterator[Browser]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        found = Browser(Path(profile))
        try:
            for domain in ("Page", "Runtime", "Log", "Network"):
                found(f"{domain}.enable")
            yield found
        finally:
            found.process.terminate()
            found.process.wait()


def _noise(events: list[dict[str, Any]], url: str) -> list[str]:
    """What a quiet page does not do."""
    found = []
    for event in events:
        method, params = event.get("method"), event.get("params", {})
        if method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            found.append(f"console: {json.dumps(params)[:300]}")
        if method == "Page.javascriptDialogOpening":
            found.append(f"dialog: {params.get('message')}")
        if method == "Network.requestWillBeSent" and params["request"]["url"].partition("#")[0] != url:
            found.append(f"request: {params['request']['url'][:200]}")
    return found


def check(b: Browser, page: Path, out: Path) -> list[str]:
    """What is wrong with a page, in words. Its pictures and its print are written to `out`."""
    url, wrong = page.resolve().as_uri(), []
    for width in WIDTHS:
        for scheme in SCHEMES:
            name = f"{page.stem}-{width}-{scheme}"
            b("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
            b("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            b.go(url)
            seen = b.value(MEASURE)
            if seen["scroll"] > seen["inner"] or seen["inner"] != width:
                wrong.append(f"{name}: scrolls sideways: {seen['scroll']} px wide in {seen['inner']}")
            if seen["least"] < LEAST_PX:
                wrong.append(f"{name}: text of {seen['least']:.1f} px in a picture")
            if seen["outside"]:
                wrong.append(f"{name}: text outside the screen: {seen['outside'][:3]}")
            if seen["hacked"] != "undefined" or seen["images"]:
                wrong.append(f"{name}: foreign text became markup ({seen['images']} elements, {seen['hacked']})")
            clip = {"x": 0, "y": 0, "width": width, "height": min(seen["height"], MOST_PX), "scale": 1}
            shot = b("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
            (out / f"{name}.png").write_bytes(base64.b64decode(shot))
            if scheme == "light" and width == WIDTHS[-1]:
                wrong += [f"{name}: {line}" for line in _sorting(b.value(SORT))]
            wrong += [f"{name}: {line}" for line in _noise(b.events, url)]
    wrong += _without_script(b, url, page.stem)
    b.events.clear()
    printed = b("Page.printToPDF", printBackground=True, preferCSSPageSize=True)["data"]
    (out / f"{page.stem}.pdf").write_bytes(base64.b64decode(printed))
    return wrong + [f"{page.stem}.pdf: {line}" for line in _noise(b.events, url)]


def _sorting(orders: list[list[str | None]]) -> list[str]:
    before, falling, rising, after = orders
    known = sorted(float(v) for v in before if v is not None)
    unknown: list[Any] = [None] * before.count(None)
    wrong = [] if len(before) < 2 or _floats(falling) == [*known[::-1], *unknown] else [f"not sorted: {falling}"]
    wrong += [] if len(before) < 2 or _floats(rising) == [*known, *unknown] else [f"not sorted: {rising}"]
    return wrong + ([] if before == after else ["the order of before is not found again"])


def _floats(texts: list[str | None]) -> list[float | None]:
    return [None if text is None else float(text) for text in texts]


def _without_script(b: Browser, url: str, name: str) -> list[str]:
    """All text is there with scripts turned off."""
    words = "document.body.innerText.split(/\\s+/).length"
    with_script = b.value(words)
    b("Emulation.setScriptExecutionDisabled", value=True)
    b.go(url)
    without = b.value(words)
    noise = _noise(b.events, url)
    b("Emulation.setScriptExecutionDisabled", value=False)
    b.go(url)
    lost = [] if without >= with_script - 5 else [f"{name}: {without} words without script, {with_script} with it"]
    return lost + [f"{name} without script: {line}" for line in noise]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, default=Path("build/pages"))
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    pages = asked.pages
    if not pages:
        from tests.test_html_report import write_pages

        pages = write_pages(asked.out)
    wrong = []
    with browser() as b:
        for page in pages:
            found = check(b, page, asked.out)
            wrong += found
            print(f"{page}: {page.stat().st_size / 1e3:,.0f} kB, {'as it should be' if not found else 'wrong'}")
    print("\n".join(wrong) or f"pictures are in {asked.out}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

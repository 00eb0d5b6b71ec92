"""Does faults beside a drive, from a process of its own, and writes down when: NAME.faults.jsonl.

The process hears the drive's start on its stdin, and ends with it: what was not begun by then is written down as not
done, the net is whole again, the engine's faults are lifted, what was to go on goes on, a command that still runs gets
GRACE_S and is then terminated.
"""

import http.client
import json
import os
import select
import shutil
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx

from llm_bench import faults, targets
from llm_bench.clock import now_ns
from llm_bench.errors import BenchError, TargetError
from llm_bench.fault_proxy import Net
from llm_bench.faults import FAULTS, Fault
from llm_bench.targets import Target

READY_S = 15.0
ANSWER_S = 30.0  # the longest that the answer to a request of ours is waited for
GRACE_S = 10.0
TAIL = 300  # characters kept of what an answer or a command said
RECOVERY_NS = 60_000_000_000  # a target that refuses connections is given so long to come back, where faults were asked


class Trouble(NamedTuple):
    """What a drive has to know of faults beside it."""

    urls: Sequence[str] = ()  # to be asked in place of the target's own: the proxy's; none: the target's
    begun: Callable[[int], None] = lambda ns: None  # to be told when the drive began
    patience_ns: int = 0  # connections are refused for at least so long before the target is taken for gone


def allowing(target: Target, planned: Sequence[Fault]) -> Target:
    """The target; where it is our engine, started for the run, and is to have faults of its own, it serves them."""
    ours = "reference_engine" in target.launch and any(fault.kind == "engine" for fault in planned)
    return replace(target, launch=(*target.launch, "--allow-faults")) if ours else target


def check(planned: Sequence[Fault], target: Target) -> None:
    """What can be seen to be wrong before any load is sent. Raises BenchError."""
    for fault in planned:
        wrong = CHECKS[fault.kind](fault.args, target) if fault.kind in CHECKS else ""
        if wrong:
            raise BenchError(f"--fault {fault.text!r}: {wrong}")


def _cmd_wrong(args: Mapping[str, Any], target: Target) -> str:
    program = args["words"][0]
    if shutil.which(program) is not None:
        return ""
    if "/" in program and Path(program).exists():
        return f"{program} cannot be executed, expected a program"
    return f"no program {program!r} is found {'there' if '/' in program else 'in PATH'}, expected one of this machine"


def _sh_wrong(args: Mapping[str, Any], target: Target) -> str:
    read = subprocess.run(
        ["/bin/sh", "-n", "-c", args["text"]], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    said = _tail(read.stderr.decode("utf-8", "replace"))
    return f"the shell cannot read it ({said}), expected a command of /bin/sh" if read.returncode else ""


def _signal_wrong(args: Mapping[str, Any], target: Target) -> str:
    pid = args["pid"]
    if pid in (os.getpid(), os.getppid()):
        return f"{pid} is this run itself, expected a server's"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return f"there is no process {pid} on this machine, expected a server's"
    except PermissionError:
        return f"process {pid} belongs to another user and may not be signalled; expected one of this user's"
    return ""


def _net_wrong(args: Mapping[str, Any], target: Target) -> str:
    if target.by_proxy():
        return f"target {target.name} is asked through an HTTP proxy, expected none"
    if any(urlsplit(url).scheme != "http" for url in target.urls):
        return (
            f"target {target.name} is asked by https, whose certificate names its own host and not the fault "
            "proxy's; expected http"
        )
    return ""


# What is wrong with a fault of a kind, here and for a target; "" where nothing is.
CHECKS: dict[str, Callable[[Mapping[str, Any], Target], str]] = {
    "cmd": _cmd_wrong,
    "sh": _sh_wrong,
    "signal": _signal_wrong,
    "net": _net_wrong,
}


@contextmanager
def beside(target: Target, planned: Sequence[Fault], path: Path, say: Callable[[str], None]) -> Iterator[Trouble]:
    """Does the faults while the block runs, counted from when it says that it began; what was done is in `path` then.

    Raises BenchError where one of them cannot be done: before the block, and so before any load.
    """
    if not planned:
        yield Trouble()
        return
    check(planned, target)
    _check_engine([fault for fault in planned if fault.kind == "engine"], target)
    work: dict[str, Any] = {"path": str(path), "urls": list(target.urls), "root": targets.root_of(target.urls[0])}
    work |= {"faults": [fault._asdict() for fault in planned], "headers": targets.auth_headers(target)}
    work |= {"insecure": target.insecure, "cafile": target.cafile, "run": os.getpid()}
    child = subprocess.Popen(
        [sys.executable, "-m", "llm_bench.fault_doing"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is the run's to handle
    )
    assert child.stdin and child.stdout
    into = child.stdin.fileno()
    try:
        with suppress(BrokenPipeError):
            child.stdin.write(json.dumps(work).encode() + b"\n")  # keys go this way: a command line can be read by all
            child.stdin.flush()
        ready, _, _ = select.select([child.stdout], [], [], READY_S)
        line = child.stdout.readline() if ready else b""
        try:
            found = json.loads(line)
        except ValueError:
            raise BenchError(
                f"target {target.name}: the process that does the faults did not start (no word in {READY_S:g} s)"
            ) from None
        if "error" in found:
            raise BenchError(f"target {target.name}: {found['error']}")
        if found["urls"]:
            added = f"{found['added_ms']:.3f} ms"
            say(f"{target.name}: asked through the fault proxy, which adds about {added} a round trip")

        def begun(start_ns: int) -> None:
            with suppress(BrokenPipeError):
                os.write(into, b"%d\n" % start_ns)  # by any process that drives: shorter than PIPE_BUF, never torn

        yield Trouble(found["urls"], begun, RECOVERY_NS)
    finally:
        with suppress(BrokenPipeError):
            child.stdin.close()
        try:
            child.wait(GRACE_S + 5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()


def ended(path: Path, planned: Sequence[Fault]) -> dict[str, Any]:
    """What the word on how a cell ended holds of its faults: {} where there were none. A lost log ends no run."""
    if not planned:
        return {}
    try:
        log = faults.read(path)
    except BenchError:
        log = faults.Log(0, None, ())
    told = [(done.what, done.planned_ns - log.start_ns) for done in log.done]
    left = [fault for fault in planned if (fault.what, fault.at_ns) not in told]
    why = "not known: the process that does the faults died before it could say"
    lost = [faults.Done(f.what, f.kind, log.start_ns + f.at_ns, 0, 0, False, why) for f in left]
    return {"faults": faults.document(log._replace(done=(*log.done, *lost)))}


def _check_engine(planned: Sequence[Fault], target: Target) -> None:
    """Does it serve faults, and these? By its own description of what POST /fault takes, where it has one."""
    if not planned:
        return
    root = targets.root_of(target.urls[0])
    answer = _get(target, f"{root}/fault")
    if answer.status_code != 200:
        raise BenchError(
            f"target {target.name}: {root}/fault answers HTTP {answer.status_code}: it serves no faults; the bundled "
            "engine does with --allow-faults (python -m reference_engine --allow-faults ...)"
        )
    try:
        rows = _get(target, f"{root}/openapi.json").json()["paths"]["/fault"]["post"]["requestBody"]["content"]
        kinds = {
            row["properties"]["kind"]["const"]: row["properties"] for row in rows["application/json"]["schema"]["oneOf"]
        }
    except (ValueError, KeyError, TypeError):  # another server's; its answer to the fault itself will be in the log
        return
    for fault in planned:
        if wrong := faults.wrong_order(fault.args["body"], kinds):
            raise BenchError(f"--fault {fault.text!r}: {wrong}")


def _get(target: Target, address: str) -> httpx.Response:
    headers = dict(targets.auth_headers(target))
    try:
        return httpx.get(address, headers=headers, timeout=ANSWER_S, verify=targets.tls(target), trust_env=False)
    except httpx.HTTPError as e:
        raise TargetError(f"target {target.name}: {address}: {type(e).__name__}") from None


# ---- the process beside the run


def main() -> None:
    """Reads its work as one line of JSON from stdin, then the drive's start, and goes on until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    work = json.loads(sys.stdin.buffer.readline())
    planned = [Fault(**row) for row in work["faults"]]
    wanted = any(fault.kind == "net" for fault in planned)
    try:
        net = Net(work["urls"]) if wanted else None
    except (OSError, ValueError) as e:
        print(json.dumps({"error": f"the fault proxy: {e}"}), flush=True)
        return
    urls, added_ms = (net.urls, net.added_ms) if net else ([], None)
    print(json.dumps({"urls": urls, "added_ms": added_ms}), flush=True)
    line = sys.stdin.buffer.readline()
    start_ns = int(line) if line.strip() else now_ns()
    with Path(work["path"]).open("ab", buffering=0) as log:
        lock = threading.Lock()

        def write(row: Mapping[str, Any]) -> None:
            with lock, suppress(OSError):  # a full disk ends the log, and not the run
                log.write(json.dumps(row).encode() + b"\n")

        write({"llm_bench_faults": 1, "start_ns": start_ns, "added_ms": added_ms})
        hands = Hands(work, net, threading.Event())
        runs = [
            threading.Thread(target=_one, args=(fault, start_ns, hands, write, bool(line)), daemon=True)
            for fault in planned
        ]
        for run in runs:
            run.start()
        while sys.stdin.buffer.readline():  # the other workers' word of the same start
            pass
        hands.stop.set()
        for run in runs:
            run.join(GRACE_S + 2)
        if net:
            net.close()
        if line and any(fault.kind == "engine" for fault in planned):
            _lift(hands)


def _lift(hands: "Hands") -> None:
    """End the engine's own faults: one without a limit would be in what the next cell has before its own. Or say so."""
    address = hands.work["root"] + "/fault"
    try:
        done, said = _ask("DELETE", address, "", hands.work["headers"], hands)
    except (OSError, http.client.HTTPException) as e:
        done, said = False, type(e).__name__
    if not done:
        print(f"faults may go on in the engine: DELETE {address}: {said}", file=sys.stderr, flush=True)


class Hands(NamedTuple):
    """What doing a fault may need. `stop`: set when the cell has ended."""

    work: Mapping[str, Any]
    net: Net | None
    stop: threading.Event


def _one(fault: Fault, start_ns: int, hands: Hands, write: Callable[[Mapping[str, Any]], None], began: bool) -> None:
    """Waits for its time, does it, writes down what came of it."""
    planned_ns = start_ns + fault.at_ns
    begun_ns = ended_ns = 0
    ok, result = False, "not done: the cell had ended before"
    heals = fault.kind == "signal" and fault.args["signal"] == signal.SIGCONT  # nothing is left stopped at the end
    if began and (not hands.stop.wait(max(0, planned_ns - now_ns()) / 1e9) or heals):
        begun_ns = now_ns()
        try:
            ok, result = DOERS[fault.kind](fault.args, hands)
        except (OSError, http.client.HTTPException, ValueError) as e:
            ok, result = False, f"{type(e).__name__}: {e}".removesuffix(": ")
        ended_ns = now_ns()
    row = faults.Done(fault.what, fault.kind, planned_ns, begun_ns, ended_ns, ok, result[: 2 * TAIL])
    write(row._asdict())


Outcome = tuple[bool, str]  # was it done as asked; what came of it


def _http(args: Mapping[str, Any], hands: Hands) -> Outcome:
    hosts = {urlsplit(url).hostname for url in hands.work["urls"]}
    own = hands.work["headers"] if urlsplit(args["url"]).hostname in hosts else []  # no other host gets the key
    return _ask(args["method"], args["url"], args["body"], own, hands)


def _engine(args: Mapping[str, Any], hands: Hands) -> Outcome:
    return _ask("POST", hands.work["root"] + "/fault", json.dumps(args["body"]), hands.work["headers"], hands)


def _ask(method: str, url: str, body: str, headers: Sequence[tuple[str, str]], hands: Hands) -> Outcome:
    parts, work = urlsplit(url), hands.work
    if parts.scheme == "https":
        context = ssl.create_default_context(cafile=work["cafile"] or None)
        if work["insecure"]:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            parts.hostname or "", parts.port, timeout=ANSWER_S, context=context
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=ANSWER_S)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    own = {"Content-Type": "application/json"} if body else {}
    try:
        connection.request(method, path, body.encode() or None, {**own, **dict(headers)})
        answer = connection.getresponse()
        said = answer.read(4 * TAIL).decode("utf-8", "replace")
    finally:
        connection.close()
    for secret in sorted({word for _, value in headers for word in (value, *value.split()[1:])}, key=len, reverse=True):
        said = said.replace(secret, targets.HIDDEN) if len(secret) >= targets.LEAST_SECRET else said
    failed = answer.status >= http.HTTPStatus.BAD_REQUEST
    return not failed, f"HTTP {answer.status}" + (f" {_tail(said)}" if failed else "")


def _cmd(args: Mapping[str, Any], hands: Hands) -> Outcome:
    return _command(args["words"], hands)


def _sh(args: Mapping[str, Any], hands: Hands) -> Outcome:
    return _command(["/bin/sh", "-c", args["text"]], hands)


def _command(words: Sequence[str], hands: Hands) -> Outcome:
    child = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    said: list[bytes] = []
    assert child.stdout
    out = child.stdout

    def hear() -> None:
        while piece := os.read(out.fileno(), 65536):
            said[:] = [b"".join(said)[-4 * TAIL :], piece]

    ear = threading.Thread(target=hear, daemon=True)  # what it leaves running may hold its output open
    ear.start()
    while child.poll() is None and not hands.stop.wait(0.01):
        pass
    cut = ""
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        child.terminate()
        cut = f"terminated, {GRACE_S:g} s after the cell had ended: "
    code = child.wait()
    ear.join(0.2)
    words_ = _tail(b"".join(said).decode("utf-8", "replace"))
    return not code and not cut, f"{cut}exit code {code}" + (f": {words_}" if words_ else "")


def _signal(args: Mapping[str, Any], hands: Hands) -> Outcome:
    pid, run = args["pid"], hands.work["run"]
    if pid in (run, os.getpid(), os.getppid()) or _parent(pid) == run:
        return False, f"not done: {pid} is of this run itself"
    os.kill(pid, args["signal"])
    return True, f"{signal.Signals(args['signal']).name} sent"


def _parent(pid: int) -> int:
    """Of a process; 0 where that is not known."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _net(args: Mapping[str, Any], hands: Hands) -> Outcome:
    assert hands.net
    number = hands.net.order(args["do"], args["value"])
    if args["do"] == "reset" and args["for_s"] is None:  # a moment: what is connected then
        hands.net.lift(number)
        return True, ""
    until_the_end = hands.stop.wait(args["for_s"])
    hands.net.lift(number)
    return True, "until the cell's end" if until_the_end else ""


DOERS: dict[str, Callable[[Mapping[str, Any], Hands], Outcome]] = {
    "http": _http,
    "cmd": _cmd,
    "sh": _sh,
    "signal": _signal,
    "net": _net,
    "engine": _engine,
}
assert list(DOERS) == list(FAULTS)


def _tail(text: str) -> str:
    """The end of it in one line of printable characters."""
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))[-TAIL:]


if __name__ == "__main__":
    main()

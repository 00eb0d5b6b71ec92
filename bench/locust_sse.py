"""What a locust user writes to read an event stream: one stamp an event, JSON of each, percentiles at the end.

Run by locust, not by us: `locust -f locust_sse.py`. The work is in ./work.json.
"""

import json
import time
from pathlib import Path

import gevent
from locust import FastHttpUser, constant, events, task

WORK = json.loads(Path("work.json").read_text())
BODY = {
    "model": "bench",
    "messages": [{"role": "user", "content": "word " * WORK["prompt_tokens"]}],
    "max_tokens": WORK["tokens"],
    "stream": True,
    "stream_options": {"include_usage": True},
}
left = WORK["requests"]
ttft_ms: list[float] = []
gap_ms: list[float] = []
ok = ended = 0


class Reader(FastHttpUser):
    wait_time = constant(0)

    @task
    def ask(self) -> None:
        global left, ok, ended
        if left <= 0:
            self.stop(force=False)
            return
        left -= 1
        sent = time.perf_counter()
        tokens, last, finished = 0, 0.0, False
        with self.client.post("/v1/chat/completions", json=BODY, stream=True, catch_response=True) as response:
            while event := response._response.readline(b"\n\n"):
                now = time.perf_counter()
                data = event.removeprefix(b"data: ")
                if data.startswith(b"[DONE]"):
                    finished = True
                    continue
                choices = json.loads(data)["choices"]
                if not choices or not choices[0]["delta"].get("content"):
                    continue
                tokens += 1
                (gap_ms if last else ttft_ms).append((now - (last or sent)) * 1e3)
                last = now
            response.success() if finished else response.failure("no [DONE]")
        ok += finished and tokens == WORK["tokens"]
        ended += 1
        if ended == WORK["requests"]:
            gevent.spawn(self.environment.runner.quit)  # from a user it would wait for that user


@events.quitting.add_listener
def report(**_: object) -> None:
    def at(values: list[float], q: float) -> float | None:
        return sorted(values)[round(q * (len(values) - 1))] if values else None

    pairs = {"ttft_ms": ttft_ms, "gap_ms": gap_ms}
    print(json.dumps({"ok": ok} | {name: [at(v, 0.5), at(v, 0.99)] for name, v in pairs.items()}), flush=True)

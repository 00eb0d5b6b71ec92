"""`python -m reference_engine`: serve one model until SIGTERM, SIGINT or the end of the parent's pipe.

SIGTERM lets requests in flight end; a second one, SIGINT and the end of the pipe do not.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from functools import partial

from reference_engine.config import EngineConfig

# A switch every 0.5 ms instead of 5: a step that computes in Python must not keep finished tokens from their sockets.
SWITCH_S = 0.0005
DRAIN_POLL_S = 0.02


def arguments() -> argparse.ArgumentParser:
    """Every field of EngineConfig is a flag."""
    parser = argparse.ArgumentParser(prog="python -m reference_engine", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free (default: %(default)s)")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable with the key that /v1 asks for")
    parser.add_argument(
        "--log-requests",
        metavar="FILE",
        nargs="?",
        const="-",
        help="append a JSON line for each request: outcome, tokens, where its time went; no FILE: to standard error",
    )
    parser.add_argument("--exit-with-stdin", action="store_true", help="stop at the end of standard input")
    for field in fields(EngineConfig):
        flag, text = "--" + field.name.replace("_", "-"), f"{field.metadata['help']} (default: {field.default!r})"
        if field.type is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default, help=text)
        else:
            kind = int if field.type is int else str
            parser.add_argument(flag, type=kind, default=field.default, help=text, metavar=kind.__name__.upper())
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 stopped when told to, 1 the engine failed, 2 usage."""
    options = arguments().parse_args(argv)
    try:
        config = EngineConfig(**{f.name: getattr(options, f.name) for f in fields(EngineConfig)})
        api_key = None if options.api_key_env is None else os.environ[options.api_key_env]
        log = _log(options.log_requests)
    except ValueError as error:
        return _usage(str(error))
    except OSError as error:
        return _usage(f"--log-requests: {error}")
    except KeyError:
        return _usage(f"--api-key-env: there is no environment variable {options.api_key_env}")
    # Read when torch is imported. Waiting threads must sleep: a spinning one takes the core of the load generator.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ["OMP_NUM_THREADS"] = str(config.threads)
    sys.setswitchinterval(SWITCH_S)
    import uvloop

    return uvloop.run(serve(config, options.host, options.port, api_key, log, options.exit_with_stdin))


async def serve(
    config: EngineConfig,
    host: str,
    port: int,
    api_key: str | None,
    log: Callable[[bytes], object] | None,
    exit_with_stdin: bool,
) -> int:
    """Load, listen, say so in one line on standard output, wait to be told to stop."""
    from reference_engine.engine import Engine
    from reference_engine.runner import ModelRunner, load
    from reference_engine.server import Server, listen

    stop, at_once = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def end() -> None:
        at_once.set()
        stop.set()

    loop.add_signal_handler(signal.SIGTERM, lambda: end() if stop.is_set() else stop.set())
    loop.add_signal_handler(signal.SIGINT, end)
    if exit_with_stdin:
        threading.Thread(target=_watch_stdin, args=(loop, end), daemon=True).start()
    try:
        runner, tokenizer = load(config)
        facts = {}
        if isinstance(runner, ModelRunner):
            runner.warmup()
            facts = runner.facts()
        config = replace(config, max_model_len=config.max_model_len or runner.max_positions)
        name = config.served_name or runner.name
        engine = Engine(config, runner, runner.eos_ids, name)
    except (ValueError, OSError) as error:
        return _usage(str(error))
    server = Server(engine, tokenizer, runner.vocab_size, name, api_key, log)
    try:
        app, port = await listen(server, host, port)
    except OSError as error:
        return _usage(f"--host {host} --port {port}: {error}")
    engine.start()
    print(json.dumps({"config": asdict(config), "runner": facts}), file=sys.stderr, flush=True)
    print(json.dumps({"listening": f"http://{host}:{port}/v1", "model": name}), flush=True)
    await stop.wait()
    server.drain()
    while not server.drained and not at_once.is_set():
        await asyncio.sleep(DRAIN_POLL_S)
    failed = bool(engine.stopped)
    await engine.stop()
    await app.cleanup()
    return int(failed)


def _log(path: str | None) -> Callable[[bytes], object] | None:
    """Writes lines to a file's end; "-" is standard error. Raises OSError."""
    if path is None:
        return None
    return partial(os.write, 2 if path == "-" else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644))


def _watch_stdin(loop: asyncio.AbstractEventLoop, end: Callable[[], None]) -> None:
    """The parent's end of the pipe closes with the parent, however it dies. os.read: no lock that outlives main."""
    while os.read(0, 4096):
        pass
    loop.call_soon_threadsafe(end)


def _usage(text: str) -> int:
    print(f"reference_engine: {text}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

"""`python -m reference_engine`: serve one model until SIGTERM, SIGINT or the end of the parent's pipe."""

import argparse
import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, fields, replace

from reference_engine.config import EngineConfig

# A switch every 0.5 ms instead of 5: a step that computes in Python must not keep finished tokens from their sockets.
SWITCH_S = 0.0005


def arguments() -> argparse.ArgumentParser:
    """Every field of EngineConfig is a flag."""
    parser = argparse.ArgumentParser(prog="python -m reference_engine", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free (default: %(default)s)")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable with the key that /v1 asks for")
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
    except ValueError as error:
        return _usage(str(error))
    except KeyError:
        return _usage(f"--api-key-env: there is no environment variable {options.api_key_env}")
    # Read when torch is imported. Waiting threads must sleep: a spinning one takes the core of the load generator.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ["OMP_NUM_THREADS"] = str(config.threads)
    sys.setswitchinterval(SWITCH_S)
    import uvloop

    return uvloop.run(serve(config, options.host, options.port, api_key, options.exit_with_stdin))


async def serve(config: EngineConfig, host: str, port: int, api_key: str | None, exit_with_stdin: bool) -> int:
    """Load, listen, say so in one line on standard output, wait to be told to stop."""
    from reference_engine.engine import Engine
    from reference_engine.runner import ModelRunner, load
    from reference_engine.server import Server, listen

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if exit_with_stdin:
        threading.Thread(target=_watch_stdin, args=(loop, stop), daemon=True).start()
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
    server = Server(engine, tokenizer, runner.vocab_size, name, api_key)
    try:
        app, port = await listen(server, host, port)
    except OSError as error:
        return _usage(f"--host {host} --port {port}: {error}")
    engine.start()
    print(json.dumps({"config": asdict(config), "runner": facts}), file=sys.stderr, flush=True)
    print(json.dumps({"listening": f"http://{host}:{port}/v1", "model": name}), flush=True)
    await stop.wait()
    failed = bool(engine.stopped)
    await engine.stop()
    await app.cleanup()
    return int(failed)


def _watch_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """The parent's end of the pipe closes with the parent, however it dies. os.read: no lock that outlives main."""
    while os.read(0, 4096):
        pass
    loop.call_soon_threadsafe(stop.set)


def _usage(text: str) -> int:
    print(f"reference_engine: {text}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

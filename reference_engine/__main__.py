"""`python -m reference_engine`: serve one model until SIGTERM, SIGINT or the end of the parent's pipe.

SIGTERM lets requests in flight end; a second one, SIGINT and the end of the pipe do not.
"""

import argparse
import asyncio
import ipaddress
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from reference_engine.config import EngineConfig

# A switch every 0.5 ms instead of 5: a step that computes in Python must not keep finished tokens from their sockets.
SWITCH_S = 0.0005
SPINS = "10000"  # of a waiting compute thread, some tens of microseconds: two threads at c = 8 made 3% more by it
DRAIN_POLL_S = 0.02
MOST_FILES = 65_536  # open ones: a connection is one
COMPUTED = ("dtype", "device", "cpu_kernels", "graphs", "quantization", "kv_cache_dtype")  # knobs of what computes


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
    parser.add_argument(
        "--log-steps",
        metavar="FILE",
        help="append a JSON line for each step: its work and its seconds (fit_cost reads it)",
    )
    parser.add_argument("--allow-faults", action="store_true", help="serve /fault, by which anybody may break things")
    parser.add_argument("--exit-with-stdin", action="store_true", help="stop at the end of standard input")
    for field in fields(EngineConfig):
        flag, text = "--" + field.name.replace("_", "-"), f"{field.metadata['help']} (default: {field.default!r})"
        # Only what was given is in the result: num_blocks and its alternatives exclude each other.
        if field.type is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        else:
            kind = field.type if field.type in (int, float) else str
            parser.add_argument(flag, type=kind, default=argparse.SUPPRESS, help=text, metavar=kind.__name__.upper())
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 stopped when told to, 1 the engine failed, 2 usage."""
    closed = _hold_standard_files()
    _allow_files()
    options = arguments().parse_args(argv)
    if 1 in closed:
        return _usage("standard output is closed; would be right: open, for it is told where the server listens")
    try:
        config = configured(options)
        api_key = None if options.api_key_env is None else os.environ[options.api_key_env]
        log = _log(options.log_requests)
        log_step = _log(options.log_steps)
    except ValueError as error:
        return _usage(str(error))
    except OSError as error:
        return _usage(f"--log-requests, --log-steps: {error}")
    except KeyError:
        return _usage(f"--api-key-env: there is no environment variable {options.api_key_env}")
    # Read when torch is imported. Waiting threads must sleep: a spinning one takes the core of the load generator. But
    # not at once: the next product comes after some microseconds, and to wake a thread takes longer.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    os.environ["OMP_NUM_THREADS"] = str(config.compute_threads)
    sys.setswitchinterval(SWITCH_S)
    import uvloop

    return uvloop.run(serve(config, options, api_key, log, log_step))


def configured(options: argparse.Namespace) -> EngineConfig:
    """Raises ValueError."""
    given = {f.name: getattr(options, f.name) for f in fields(EngineConfig) if hasattr(options, f.name)}
    config = EngineConfig(**given)
    sized = config.kv_memory or config.memory_fraction
    if sized and "num_blocks" in given:
        raise ValueError("num_blocks is given, and bytes of the pool as well; would be right: one of them")
    if config.model.startswith("sim:") and (sized or config.preemption == "swap"):
        raise ValueError(f"{config.model} has no memory; would be right: num_blocks and preemption recompute")
    if config.model.startswith("sim:") and config.lora_dir:
        raise ValueError(f"{config.model} computes no adapters; would be right: no lora_dir")
    if config.model.startswith("sim:"):
        plain = EngineConfig()
        for name in COMPUTED:
            if getattr(config, name) != getattr(plain, name):
                raise ValueError(
                    f"{config.model} computes nothing, so that {name} has no effect; would be right: no {name}, and a "
                    "precision in the name, sim:8b-w8-kv8-h100"
                )
    if not 0 <= options.port <= 65535:  # uvloop takes it modulo 65,536
        raise ValueError(f"--port is {options.port}; would be right: 0 to 65535")
    if config.lora_dir and not Path(config.lora_dir).is_dir():
        raise ValueError(f"lora_dir is {config.lora_dir!r}; would be right: a folder")
    return config


async def serve(
    config: EngineConfig,
    options: argparse.Namespace,
    api_key: str | None,
    log: Callable[[bytes], object] | None,
    log_step: Callable[[bytes], object] | None,
) -> int:
    """Load, listen, say so in one line on standard output, wait to be told to stop or for the engine to fail."""
    from reference_engine import cost_model, kv_memory
    from reference_engine.engine import Engine, out_of_memory
    from reference_engine.runner import ModelRunner, load
    from reference_engine.server import Server, listen

    stop, at_once = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def end() -> None:
        at_once.set()
        stop.set()

    loop.add_signal_handler(signal.SIGTERM, lambda: end() if stop.is_set() else stop.set())
    loop.add_signal_handler(signal.SIGINT, end)
    if options.exit_with_stdin:
        threading.Thread(target=_watch_stdin, args=(loop, end), daemon=True).start()
    try:
        runner, tokenizer = load(kv_memory.preliminary(config))
        facts: dict[str, Any] = {}
        copy = None
        if isinstance(runner, ModelRunner):
            runner.warmup()
            runner.capture()  # what graphs take is not free
            config, memory = kv_memory.settle(config, runner)
            runner.capture()  # of the pool that was made, if it is another
            config = replace(config, graphs="on" if runner.graphs else "off")
            config = kv_memory.with_swap(config, memory.block_bytes)
            if config.swap_blocks:
                copy = kv_memory.HostPool(runner, config.swap_blocks).copy
            memory = memory._replace(swap_bytes=config.swap_blocks * memory.block_bytes)
            facts = runner.facts() | {"memory": memory._asdict()}
        config = replace(config, max_model_len=config.max_model_len or runner.max_positions)
        name = config.served_name or runner.name
        engine = Engine(
            config, runner, runner.eos_ids, name, cost_model.clock(config.time_scale)[0],
            reload=partial(_reload, config, getattr(runner, "adapters", {})), tell=_say, on_end=stop.set, copy=copy,
            log_step=log_step,
        )  # fmt: skip
    except (ValueError, OSError) as error:
        return _usage(str(error))
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        return _usage(f"memory does not hold the model and a pool of {config.num_blocks} blocks: {error}")
    server = Server(engine, tokenizer, runner.vocab_size, name, api_key, log, options.allow_faults)
    del runner  # the engine's alone: where it is loaded anew, the old one must go first
    host = options.host
    try:
        app, port = await listen(server, host, options.port)
    except OSError as error:
        return _usage(f"--host {host} --port {options.port}: {error}")
    if warning := exposed(host, api_key is not None, options.allow_faults):
        _say(warning)
    engine.start()
    heard = _announce(
        {"config": asdict(config), "runner": facts}, {"listening": f"http://{_in_url(host)}:{port}/v1", "model": name}
    )
    if not heard:
        end()
    await stop.wait()
    server.drain()
    while not server.drained and not at_once.is_set():
        await asyncio.sleep(DRAIN_POLL_S)
    failed = bool(engine.stopped)
    await engine.stop()
    await app.cleanup()
    return int(failed) if heard else 2


WILDCARDS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # of all addresses, the one that is always there


def _in_url(host: str) -> str:
    """A host as URLs have it: an address that can be connected to, IPv6 in brackets."""
    host = WILDCARDS.get(host, host)
    return f"[{host}]" if ":" in host else host


def _announce(effective: dict[str, Any], listening: dict[str, str]) -> bool:
    """The settings to standard error, then the address to standard output; False where nobody can be told."""
    try:
        print(json.dumps(effective), file=sys.stderr, flush=True)
        print(json.dumps(listening), flush=True)
    except OSError as error:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)  # what is still in the buffer goes nowhere at the end
        _say(f"standard output and error cannot be written: {error.strerror}")
        os.dup2(null, 2)
        return False
    return True


def _reload(config: EngineConfig, adapters: dict[int, Any]) -> Any:
    """The runner anew, with the adapters that the old one had."""
    from reference_engine.runner import ModelRunner, load

    runner, _ = load(config)
    if isinstance(runner, ModelRunner):
        runner.adapters = adapters
        runner.capture()
    return runner


def exposed(host: str, key: bool, faults: bool) -> str:
    """What to say of an address that other machines reach; "" for a loopback one."""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, or "" for all addresses
        loopback = False
    if loopback:
        return ""
    who = "whoever has the key, which goes unencrypted," if key else "anybody"
    what = "use this server and break it by /fault" if faults else "use this server"
    advice = "" if key else "; --api-key-env NAME asks for a key, --host 127.0.0.1 keeps it to this machine"
    return f"warning: --host {host or repr('')}: {who} on the network can {what}{advice}"


def _log(path: str | None) -> Callable[[bytes], object] | None:
    """Writes lines to a file's end; "-" is standard error. Raises OSError."""
    if path is None:
        return None
    return partial(os.write, 2 if path == "-" else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644))


def _watch_stdin(loop: asyncio.AbstractEventLoop, end: Callable[[], None]) -> None:
    """The parent's end of the pipe closes with the parent, however it dies. os.read: no lock that outlives main."""
    with suppress(OSError):  # what cannot be read is at its end
        while os.read(0, 4096):
            pass
    with suppress(RuntimeError):  # the loop has ended before it
        loop.call_soon_threadsafe(end)


def _allow_files() -> None:
    """As many connections as may be: shells commonly allow a process 1,024 files and let it have more if it asks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _hold_standard_files() -> list[int]:
    """Which of 0, 1 and 2 were closed before the start: the next socket would be one of them, and libuv aborts on that.

    Python has None for such a stream, and what is printed to None goes to standard output.
    """
    closed = []
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        closed.append(fd)
    os.close(fd)
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    return closed


def _usage(text: str) -> int:
    _say(text)
    return 2


def _say(text: str) -> None:
    """To standard error as it is, not through Python: what cannot be written would be tried again at the end."""
    with suppress(OSError):  # nobody hears it: no reason to end
        os.write(2, f"reference_engine: {text}\n".encode(errors="backslashreplace"))


if __name__ == "__main__":
    sys.exit(main())

"""What is said on stderr and shown on stdout, whatever state they are in: full, closed, without Unicode."""

import errno
import io
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from llm_bench import files, printable
from llm_bench.errors import BenchError


class OutputError(BenchError):
    """What was found could not be shown: no fault of the measurement, whose records are on disk, and no verdict.

    2, a limit of this machine: 1 would read as a gate's FAIL, or as a limit that was missed.
    """


class InterruptError(BenchError):
    """Ctrl-C, in words."""

    exit_code = 130


def prepare() -> None:
    """An ASCII terminal, or half a surrogate pair in a text, then costs a character and not the report."""
    if sys.stdout is None:  # closed before we started: `>&-`. This one has a stream's methods, and takes nothing
        sys.stdout = Path(os.devnull).open(encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def voice() -> tuple[Callable[[str], None], Callable[[str], None]]:
    """(say, live) on stderr: a line that stays; and one that is overwritten, or every 5 s a line where no one looks."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)

    def say(text: str) -> None:
        with suppress(OSError):  # a stderr that is full or gone is no reason to lose a measurement
            console.print(printable.lines(text), markup=False, emoji=False)

    if console.is_terminal:
        status = console.status("")

        def live(text: str) -> None:
            if not text:
                status.stop()
                return
            status.update(Text(printable.clean(text)))
            status.start()

        return say, live
    last = [time.monotonic()]

    def sparse(text: str) -> None:
        if text and time.monotonic() - last[0] >= 5:
            last[0] = time.monotonic()
            say(text)

    return say, sparse


def show(text: str, then: str = "") -> None:
    """On standard output, all of it. Raises OutputError, which ends with `then`."""
    try:
        sys.stdout.write(printable.lines(text, colour=True))
        sys.stdout.flush()
    except OSError as e:
        drop_stdout()
        raise OutputError(f"standard output cannot be written: {e.strerror or 'it is closed'}{then}") from None


def save(path: Path, text: str) -> None:
    """In a file, as `files.whole` makes it. Raises OutputError."""
    try:
        with files.whole(path) as part:
            part.write_text(text, encoding="utf-8", errors="replace")
    except OSError as e:
        raise OutputError(f"{path}: cannot be written: {e.strerror or e}") from None


def is_full(error: Exception) -> bool:
    """Is this a write to a stream, of someone else's, that failed as `show` can?"""
    return isinstance(error, OSError) and error.errno in (None, errno.EPIPE, errno.ENOSPC) and not error.filename


def drop_stdout() -> None:
    """What a failed write left in its buffer would be tried again at exit, and end in a traceback."""
    with suppress(OSError, AttributeError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(sentence: str) -> None:
    """One sentence on stderr, where there is one."""
    with suppress(OSError, AttributeError):
        sys.stderr.write(f"llm-bench: {printable.lines(sentence)}\n")
        sys.stderr.flush()

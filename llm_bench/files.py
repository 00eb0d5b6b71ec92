"""A file that appears under its name when it is whole."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Where to write what is to stand at `path`: beside it first, and under its name at the end.

    What is no regular file, as a device, a pipe or a link, is written to where it stands: a new file would take its
    place. Raises OSError; of a new file nothing is left then.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        yield path
        return
    part = path.with_name(f"{path.name}.part")
    try:
        yield part
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)

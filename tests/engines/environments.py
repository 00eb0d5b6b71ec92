"""Environments of real servers, one each, under build/engines/NAME: made once, kept, never the tests' own.

python -m tests.engines.environments mlserver triton        installs these; no name: what the table has
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

HOME = Path(__file__).resolve().parents[2] / "build" / "engines"
INSTALL_LIMIT_S = 900
# By the release of constraints.txt, and alone: its needs come with what follows. With CUDA or without is pip's to say.
TORCH = "--no-deps torch==2.13.0"


def python(name: str) -> Path:
    return HOME / name / "bin" / "python"


def packages_of(name: str) -> Path:
    """Where the environment's packages lie."""
    return next((HOME / name / "lib").glob("python*")) / "site-packages"


def lacks(name: str, packages: Sequence[str]) -> str:
    """Why the environment cannot be used; "" where it holds these packages. Tests skip with it."""
    done = _done(name)
    if not packages or (done.is_file() and done.read_text().split("\n") == list(packages)):
        return ""
    return f"{name} is not installed: python -m tests.engines.environments {name}"


def install(name: str, packages: Sequence[str], after: Callable[[Path], None]) -> float:
    """Seconds that it took; 0 where it is there. Raises CalledProcessError where pip cannot."""
    if not lacks(name, packages):
        return 0.0
    begun_s = time.monotonic()
    pip = [str(python(name)), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    for command in ([sys.executable, "-m", "venv", str(HOME / name)], *([*pip, *line.split()] for line in packages)):
        subprocess.run(command, check=True, timeout=INSTALL_LIMIT_S)
    after(HOME / name)
    _done(name).write_text("\n".join(packages))
    return time.monotonic() - begun_s


def _done(name: str) -> Path:
    return HOME / name / "installed.txt"


def main() -> None:
    from tests.engines.table import ENGINES

    failed = []
    for name in sys.argv[1:] or ENGINES:
        engine = ENGINES[name]
        if why := engine.needs():
            print(f"{name}: not here: {why}", flush=True)
            continue
        try:
            took_s = install(name, engine.packages, engine.after)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as e:
            failed.append(name)
            print(f"{name}: {e}", flush=True)
            continue
        print(f"{name}: {f'installed in {took_s:.0f} s' if took_s else 'there already'}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

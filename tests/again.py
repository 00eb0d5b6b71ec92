"""The tests that failed, once more, with nothing beside them: `python -m tests.again`, after a `make test` that failed.

A machine that is stopped for a second, or takes memory back, breaks a bound that no fault of ours broke. Each is named
whatever becomes of it, since a test that fails beside others is to be mended too; one that fails again has failed. More
than MOST are no such accident.
"""

import json
import subprocess
import sys
from pathlib import Path

MOST = 3
FAILED = Path(".pytest_cache/v/cache/lastfailed")  # pytest's own list


def main() -> int:
    try:
        names = sorted(json.loads(FAILED.read_text()))
    except (OSError, ValueError):
        names = []
    if not 0 < len(names) <= MOST:
        print(f"{len(names)} tests failed: they are judged once more only where they are 1 to {MOST}", file=sys.stderr)
        return 1
    print("failed beside others, now alone:", *names, sep="\n  ", flush=True)
    return subprocess.run([sys.executable, "-m", "pytest", "-v", *names], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

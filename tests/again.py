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
ENDED = Path(".pytest_cache/ended")  # exit code of that `make test`: 1 where all were run and some failed


def main() -> int:
    try:
        names = sorted(json.loads(FAILED.read_text())) if ENDED.read_text().strip() == "1" else []
    except (OSError, ValueError):
        names = []
    ENDED.unlink(missing_ok=True)  # judged once more, not twice
    if not 0 < len(names) <= MOST or not all("::" in name for name in names):  # without: a file that was not collected
        print(
            f"not run once more: that is only for 1 to {MOST} failures of a run that came to its end", file=sys.stderr
        )
        return 1
    print("failed beside others, now alone:", *names, sep="\n  ", flush=True)
    return subprocess.run([sys.executable, "-m", "pytest", "-v", *names], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

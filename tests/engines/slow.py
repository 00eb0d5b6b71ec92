"""The contract on every real server that runs here, and their own accounts of TTFT and TPOT beside ours.

python -m pytest tests/engines/slow.py -s        `make test-engines`; no part of `make test`
"""

from pathlib import Path

import pytest

from tests.engines.serve import Spoken
from tests.engines.table import ENGINES, QUICK
from tests.engines.trying import ACCOUNTS, Up, each, hold, up

__all__ = ["up"]

# By how much our TPOT may lie beyond a server's own: of its own, or ms, whichever is more.
TPOT_SHARE, TPOT_MS = 0.1, 1.0


@each([name for name in ENGINES if name not in QUICK])
def test_it_keeps_the_contract(up: Up, name: str, spoken: Spoken, check: str, tmp_path: Path) -> None:
    hold(up, name, spoken, check, tmp_path)


def test_what_servers_say_of_their_own_times_is_what_we_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """A client cannot see a token before its server has made it. Ours is above theirs by what stands between: sending,
    the server's HTTP, its tokenizer, and where it counts prefill alone (llama.cpp) the wait for a slot and a batch.
    """
    if not ACCOUNTS:
        pytest.skip("no server that keeps accounts was tried")
    with capsys.disabled():
        print("\nserver, api                     c  what            its own ms   ours beyond it, ms (medians of 12)")
        for who, api, c, what, theirs, beyond in ACCOUNTS:
            print(f"{who + ', ' + api:<32}{c}  {what:<16}{theirs:>10.2f}{beyond:>+12.2f}")
    for _, _, _, what, theirs, beyond in ACCOUNTS:
        if what == "server_tpot_ms":
            assert abs(beyond) <= max(TPOT_MS, TPOT_SHARE * theirs)
        else:
            assert beyond > 0

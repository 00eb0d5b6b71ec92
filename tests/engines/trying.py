"""Real servers for tests: each is started by the first that asks for it, and ended when another is asked for."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from llm_bench.dialects import DIALECTS
from tests.engines import environments
from tests.engines.serve import Spoken, serving
from tests.engines.table import ENGINES

pytest.register_assert_rewrite("tests.engines.contract")  # so that it says what it found
from tests.engines.contract import ACCOUNTS, CHECKS, Site  # noqa: E402

__all__ = ["ACCOUNTS", "Up", "each", "hold", "up"]

Up = Callable[[str], list[str]]  # name of an engine -> its URLs; skips the test where it cannot be had


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    running: dict[str, list[str]] = {}
    with ExitStack() as stack:

        def roots(name: str) -> list[str]:
            engine = ENGINES[name]
            if why := engine.needs() or environments.lacks(engine.name, engine.packages):
                pytest.skip(why)
            if name not in running:
                stack.close()
                running.clear()
                running[name] = stack.enter_context(serving(engine, tmp_path_factory.mktemp("engine")))
            return running[name]

        yield roots


def each(names: Sequence[str]) -> pytest.MarkDecorator:
    """Every check of the contract, on every protocol of these engines that has a row."""
    cases = [
        pytest.param(name, spoken, check, id=f"{name}-{spoken.api}-{check}")
        for name in names
        for spoken in ENGINES[name].spoken
        if spoken.api in DIALECTS
        for check in CHECKS
    ]
    return pytest.mark.parametrize(("name", "spoken", "check"), cases)


def hold(up: Up, name: str, spoken: Spoken, check: str, folder: Path) -> None:
    CHECKS[check](Site(name, up(name)[spoken.port], spoken, folder))

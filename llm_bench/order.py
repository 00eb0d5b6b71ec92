"""What driving one cell takes, wherever its workers are: processes of this machine, or other hosts."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from llm_bench.beside import Say
from llm_bench.cell import Cell
from llm_bench.fault_doing import Trouble
from llm_bench.plan import Plan

# (seconds since the start, in flight, ended) four times a second -> reason to end the cell now, "" for none
Watch = Callable[[float, int, int], str]


class Order(NamedTuple):
    cell: Cell
    work: Plan
    facts: Mapping[str, Any]  # of each record file's header
    workers: int
    say: Say
    live: Say
    watch: Watch | None
    trouble: Trouble

"""A client whose own loop is blocked is not believed, from the loop to a gate's exit code."""

import time
from pathlib import Path

from typer.testing import CliRunner

from llm_bench import cli, results, run
from llm_bench.arms import Rounds
from llm_bench.cell import Options
from llm_bench.plan import Load
from llm_bench.targets import Target
from tests.bench import good, llm_server, rows, trace_file
from tests.scripted import Scripted

PAIRS = 5  # the fewest that can decide a test


def test_a_gate_over_cells_whose_loop_was_blocked_is_inconclusive(tmp_path: Path) -> None:
    def live(text: str) -> None:  # called within the event loop, four times a second
        time.sleep(0.03 if text else 0.0)

    with Scripted(llm_server(lambda n, seen: good(seen, 200))) as server:
        arms = [Target("base", server.url), Target("cand", server.url)]
        job = run.Job(arms, [Load(concurrency=4)], trace_file(tmp_path, rows(20)))
        options = Options(tmp_path / "run", rounds=Rounds(PAIRS, interleave=True))
        ended = run.run(job, options, lambda text: None, live)
    assert not (ended.interrupted or ended.gone or ended.died)
    assert results.verdict(results.load_run(options.out)).client_limited
    gate = [str(options.out), "--baseline", "base", "--candidate", "cand", "--rule", "ttft_p95<=+50%"]
    judged = CliRunner().invoke(cli.app, ["gate", *gate])
    assert judged.exit_code == 3, judged.output
    assert "INCONCLUSIVE" in judged.output
    assert "client" in judged.output

"""The kernels' bench, compiler check and GPU script, as far as a machine without a GPU can try them."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dense_kernels import needs_triton

# isort: split
from kernels import bench, cases, gpu, gpu_engine, random_model, sampling, swiglu
from kernels.bench import Ceilings, Timing
from kernels.cases import CASES, Sizes

pytestmark = [pytest.mark.engine, needs_triton]
ROOT = Path(__file__).parents[1]


def test_without_a_gpu_every_kernel_is_right_and_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["all", "--interpret"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert not printed["measured"]
    assert "nothing is measured" in printed["about"]
    assert [row["kernel"] for row in printed["correct"]] == list(CASES)
    assert all(0 <= row["error"] <= row["allowed"] for row in printed["correct"])


def test_a_wrong_kernel_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(swiglu, "swiglu", lambda both, out: out.fill_(1.0))
    assert bench.main(["swiglu", "--interpret", "--json", str(tmp_path / "found.json")]) == 1
    assert not json.loads((tmp_path / "found.json").read_text())["correct"][0]["ok"]


def test_a_result_that_is_not_written_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NaN is no error below any limit, and no number of JSON's."""
    monkeypatch.setattr(swiglu, "swiglu", lambda both, out: out.fill_(float("nan")))
    found = tmp_path / "found.json"
    assert bench.main(["swiglu", "--interpret", "--json", str(found)]) == 1
    for text in (found.read_text(), capsys.readouterr().out):
        (row,) = json.loads(text, parse_constant=pytest.fail)["correct"]
        assert (row["error"], row["ok"]) == ("nan", False)
    report = gpu.report({"correctness": {"rows": [row], "same_in_any_batch": {}, "took_s": 1.0}})
    assert f"| swiglu | {row['shape']} | nan |" in report


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("softmax", "'softmax' is no kernel; would be right: all, paged_attention,"),
        ("swiglu --batch 0", "batch is 0; would be right: 1 or more"),
        ("swiglu --dtype fp4", "dtype is 'fp4'; would be right: float32, float16, bfloat16"),
        ("swiglu --kv-dtype fp4", "kv_dtype is 'fp4'; would be right: auto, int8, float8"),
        ("swiglu --heads 6 --kv-heads 4", "heads is 6, kv_heads 4; would be right: a multiple"),
        ("swiglu --query 9 --context 8", "query is 9, context 8"),
        ("sampling --top-p 0", "top_p is 0.0"),
        ("swiglu --interpret --json /nowhere/x", "No such file"),
        ("swiglu --interpret --json /dev/null", "--json /dev/null is no file"),
        ("swiglu --interpret --json .", "--json . is no file"),
        ("swiglu --interpret --dtype float16", "--interpret takes tiny shapes of its own"),
        ("paged_attention --batch 64 --context 4096", "no GPU to measure on; would be right: --interpret"),
    ],
)
def test_a_mistake_is_said_in_a_line(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(words.split()) == 2
    err = capsys.readouterr().err
    assert err.startswith("kernels.bench: ")
    assert said in err
    assert err.count("\n") == 1


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is tried is what will be done: a new file beside it takes its place."""
    monkeypatch.setattr(bench, "_run", lambda *of: pytest.fail("measured"))
    (tmp_path / "found.json").write_text("of an earlier run")
    (tmp_path / "found.json.new").mkdir()
    for place in ("nowhere/x", "found.json"):
        assert bench.main(["swiglu", "--interpret", "--json", f"{tmp_path}/{place}"]) == 2
        assert capsys.readouterr().err.startswith("kernels.bench: [Errno ")
    assert (tmp_path / "found.json").read_text() == "of an earlier run"


def test_a_file_that_cannot_be_put_in_place_is_not_left_beside_it(tmp_path: Path) -> None:
    place = tmp_path / "found.json"
    place.mkdir()
    with pytest.raises(OSError, match="directory"):
        bench.save(place, {})
    assert list(tmp_path.iterdir()) == [place]


@pytest.mark.parametrize("problem", [ValueError("odd"), OSError(28, "No space left on device"), RuntimeError("CUDA")])
def test_a_bench_that_fails_half_way_prints_the_rows_it_had(
    problem: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, row = tmp_path / "found.json", {"kernel": "rms_norm", "ok": True}

    def correct(name: str, *of: object) -> dict[str, Any]:
        if name != "rms_norm":
            raise problem
        return row

    monkeypatch.setattr(bench, "correct", correct)
    for kernels, done in (("swiglu", []), ("rms_norm swiglu", [row])):
        words = [*kernels.split(), "--interpret", "--json", str(found)]
        if isinstance(problem, RuntimeError):  # no mistake of the user's: a traceback
            with pytest.raises(RuntimeError, match="CUDA"):
                bench.main(words)
        else:
            assert bench.main(words) == 2
        printed = capsys.readouterr().out
        assert (json.loads(printed)["correct"] if done else printed) == (done or "")
        results = json.loads(found.read_text())  # from the beginning, also over an earlier run's
        assert (results["correct"], results["left"]) == (done, ["swiglu"])


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_bench_leaves_the_rows_it_had(
    end: type[BaseException], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C is answered; of what ends the process otherwise, the file is all that is left."""
    found, done = tmp_path / "found.json", [{"kernel": name, "ok": True} for name in ("rms_norm", "swiglu")]
    found.write_text("of an earlier run")

    def correct(name: str, *of: object) -> dict[str, Any]:
        if name == "sampling":
            raise end
        return {"kernel": name, "ok": True}

    monkeypatch.setattr(bench, "correct", correct)
    words = ["rms_norm", "swiglu", "sampling", "kv_write", "--interpret", "--json", str(found)]
    if end is KeyboardInterrupt:
        assert bench.main(words) == 130
        printed = capsys.readouterr()
        assert json.loads(printed.out)["correct"] == done
        assert printed.err == "kernels.bench: interrupted\n"
    else:
        with pytest.raises(end):
            bench.main(words)
    results = json.loads(found.read_text())
    assert (results["correct"], results["left"]) == (done, ["sampling", "kv_write"])
    assert list(tmp_path.iterdir()) == [found]


# 64 sequences of 4,096 tokens at 8B shapes, by hand.
BYTES: list[tuple[str, dict[str, Any], int, int]] = [
    ("paged_attention", {}, 64 * 4096 * 4096 + 2 * 64 * 8192, 4 * 64 * 4096 * 4096),
    ("paged_attention", {"kv_dtype": "int8"}, 64 * 4096 * (2048 + 64) + 2 * 64 * 8192, 4 * 64 * 4096 * 4096),
    (
        "paged_attention",
        {"batch": 1, "query": 8192, "context": 8192},
        8192 * 4096 + 2 * 8192 * 8192,
        4 * (8192 * 8193 // 2) * 4096,
    ),
    ("kv_write", {}, 64 * 4096 * 2, 0),
    ("rms_norm", {}, 2 * 64 * 8192 + 8192, 0),
    ("add_rms_norm", {}, 4 * 64 * 8192 + 8192, 0),
    ("norm_rope", {}, 64 * (2 * 40 * 256 + 256), 0),
    ("swiglu", {}, 3 * 64 * 14_336 * 2, 0),
    ("int8_matmul", {"batch": 1}, 4096 * 4096 + 4 * 4096 + 2 * 8192, 2 * 4096 * 4096),
    ("sampling", {}, 64 * 128_256 * 4, 0),
]


@pytest.mark.parametrize(("name", "changes", "moved", "flops"), BYTES)
def test_bytes_and_operations_by_hand(name: str, changes: dict[str, Any], moved: int, flops: int) -> None:
    case = CASES[name](replace(Sizes(), **changes))
    assert (case.moved_bytes, case.flops) == (moved, flops)


@pytest.mark.parametrize(("moved", "turns"), [(1, 256), (10**7, 52), (10**9, 2)])
def test_inputs_take_turns_until_no_cache_holds_them(moved: int, turns: int) -> None:
    case = CASES["swiglu"](Sizes())._replace(moved_bytes=moved)
    assert bench.sets(case) == turns


def test_figures_are_the_bytes_over_the_time() -> None:
    case = CASES["swiglu"](Sizes())._replace(moved_bytes=2 * 10**9, flops=10**12)
    found = bench._figures(case, Timing(1000.0, 990.0, 1100.0, 2, "eager", 20), Ceilings(4000.0, 2000.0))
    assert found["gb_s"] == 2000
    assert found["percent_of_copy"] == 50
    assert found["tflop_s"] == 1000
    assert found["percent_of_matmul"] == 50
    row = found | {"kernel": "k", "shape": "s", "flops": case.flops, "times_torch": 1.5}
    row |= {"torch_in": "graph", "torch_replays": bench.REPLAYS}
    assert bench.table([row]).splitlines()[2] == "| k | s | 1000.0 (eager) | 2000 | 50.0 | 1000.0 | 50.0 | 1.50 |"


@pytest.mark.parametrize(
    ("way", "replays", "said"),
    [
        ("graph", 20, ""),
        ("graph", 3, " (of 3)"),
        ("eager", 3, " (eager, of 3)"),
        ("rehearsed", 1, " (rehearsed)"),
    ],
)
def test_the_table_says_what_a_timing_is_the_median_of(way: str, replays: int, said: str) -> None:
    case = CASES["swiglu"](Sizes())
    found = bench._figures(case, Timing(1000.0, 990.0, 1100.0, 2, way, replays), Ceilings(4000.0, 2000.0))
    row = found | {"kernel": "k", "shape": "s", "flops": 1, "times_torch": 1.5}
    row |= {"torch_in": way, "torch_replays": replays}
    cells = [cell.strip() for cell in bench.table([row]).splitlines()[2].split("|")]
    assert (cells[3], cells[8]) == (f"1000.0{said}", f"1.50{said}")


def test_torchs_replays_are_recorded_beside_ours() -> None:
    row = bench.measure("rms_norm", bench.TINY, Ceilings(1.0, 1.0), bench.rehearsal())
    assert (row["replays"], row["torch_replays"]) == (1, 1)


@pytest.mark.parametrize(
    ("name", "changes"),
    [(n, c) for n, c in gpu.MEASURED] + [(n, gpu.ODD | c) for n, c in gpu.CORRECT],
    ids=lambda v: v if isinstance(v, str) else ",".join(f"{k}={x}" for k, x in v.items() if k not in gpu.ODD),
)
def test_what_the_gpu_script_will_run_passes_the_kernels_own_checks(
    name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On tensors without memory, nothing being launched."""
    from triton.runtime.interpreter import InterpretedFunction

    launched = []
    monkeypatch.setattr(InterpretedFunction, "run", lambda self, *a, **k: launched.append(self))
    case = CASES[name](replace(Sizes(), **changes))
    inputs = case.make(torch.device("meta"))
    case.ours(inputs)
    assert launched
    if case.torchs:
        case.torchs(inputs)  # a value read on the host would fail here as it fails in a capture


def test_every_kernel_compiles_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    """PTX and machine code for an H100: no launch, hence nothing of speed or of what it computes."""
    found = tmp_path / "compiled.json"
    command = [sys.executable, "-m", "kernels.bench", "all", "--compile", "90", "--json", str(found)]
    environment = gpu_engine.environment_of() | {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    compiled = json.loads(found.read_text())["compiled"]
    assert {row["kernel"] for row in compiled} == set(CASES)
    for row in compiled:
        made = row["launched"]
        assert made["shared_bytes"] <= 227 * 1024, row  # what an H100 gives a program
        assert made["spilled_bytes"] <= 64, row  # a few values outside the inner loops
        assert made["registers"] <= 255, row


def test_stages_fit_the_whole() -> None:
    assert sum(stage.limit_s for stage in gpu.STAGES.values()) <= gpu.WHOLE_S <= 480
    assert set(gpu.STAGES) == set(gpu.SECTIONS)


def test_a_stage_has_what_those_before_it_left_and_cuts_none_after_it() -> None:
    left, names = gpu.WHOLE_S, list(gpu.STAGES)
    assert gpu.limit(names, left) >= 25  # the first one imports torch from a cold disk
    for number, name in enumerate(names):
        found = gpu.limit(names[number:], left)
        assert found >= gpu.STAGES[name].limit_s
        left -= found  # each takes all that it may
    assert left == 0
    assert gpu.limit(["batching"], 100.0) == 100.0
    assert gpu.limit(names, 10.0) == 0


def stage(name: str, folder: Path, limit_s: float = 60.0) -> dict[str, Any]:
    place = folder / "result.json"
    return gpu._result(place, gpu._in_a_process(name, True, limit_s, place, str(folder)))


def test_a_stage_that_fails_or_hangs_leaves_its_words(tmp_path: Path) -> None:
    assert "invalid choice: 'nothing'" in stage("nothing", tmp_path)["failed"]
    assert stage("engine", tmp_path, 0.05)["failed"].startswith("stopped after 0 s")


ROWS = [{"kernel": "k", "shape": "s", "error": 0.1, "allowed": 0.2, "ok": True}]


def saves_and_hangs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage is a program that has saved ROWS and does not end."""
    program = f"""
import json, os, sys, time
print("so far so good", flush=True)
place = sys.argv[sys.argv.index("--result") + 1]
with open(place + ".new", "w") as new:
    json.dump({{"rows": json.loads({json.dumps(ROWS)!r}), "same_in_any_batch": {{}}}}, new)
os.replace(place + ".new", place)
time.sleep(60)
"""
    script = folder / "python"
    script.write_text(f"#!{sys.executable}{program}")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def test_a_stage_that_is_stopped_leaves_the_rows_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves_and_hangs(tmp_path, monkeypatch)
    found = stage("correctness", tmp_path, 8.0)
    assert found["rows"] == ROWS
    assert found["failed"] == "stopped after 8 s: so far so good\n"
    assert not gpu.whole(found)
    written = gpu.report({"correctness": found | {"took_s": 8.0}})
    assert "NOT whole" in written
    assert "| k | s | 1.0e-01 | 2.0e-01 |" in written


def test_an_interrupted_stage_leaves_the_rows_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing of an earlier run's is left, of this stage or another."""
    out = tmp_path / "out"
    out.mkdir()
    for name in ("gpu.json", "gpu.md", "gpu-correctness.json"):
        (out / name).write_text("of an earlier run")
    saves_and_hangs(tmp_path, monkeypatch)
    wait, old = subprocess.Popen.wait, []

    def interrupted(child: "subprocess.Popen[bytes]", timeout: float | None = None) -> int:
        if timeout is None:
            return wait(child)
        old.extend(p.name for p in out.iterdir() if p.read_text() == "of an earlier run")
        end = time.monotonic() + 60
        while not (out / "gpu-correctness.json").exists() and time.monotonic() < end:
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    assert gpu.main(["--rehearse", "--only", "correctness", "--out", str(out)]) == 130
    assert old == []
    assert sorted(p.name for p in out.iterdir()) == ["gpu.json", "gpu.md"]
    found = json.loads((out / "gpu.json").read_text())["correctness"]
    assert (found["rows"], found["failed"]) == (ROWS, "interrupted")
    assert "NOT whole" in (out / "gpu.md").read_text()
    assert capsys.readouterr().err.splitlines()[-1] == f"kernels.gpu: interrupted; what was measured is in {out}"


def test_the_script_rehearsed_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The engine under llm-bench's load, and its answers, in processes of their own, as on a GPU."""
    stages = ["environment", "ceilings", "answers", "engine"]
    assert gpu.main(["--rehearse", "--only", ",".join(stages), "--out", str(tmp_path)]) == 0, (
        tmp_path / "gpu.md"
    ).read_text()
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert list(found) == stages
    assert found["answers"]["same"] == found["answers"]["asked"] == 8
    cells = found["engine"]["cells"]
    assert len(cells) == 2
    for cell in cells:
        assert cell["error_rate"] == 0
        assert cell["tokens_per_second"] > 0
        assert "times_floor" not in cell  # nothing is measured of a card that is not there
    assert cells[1]["step_floor_bytes"] > cells[0]["step_floor_bytes"]
    report = (tmp_path / "gpu.md").read_text()
    assert report.strip() == capsys.readouterr().out.strip()
    assert "a rehearsal on a CPU, nothing is measured" in report
    assert sorted(p.name for p in tmp_path.iterdir()) == ["gpu.json", "gpu.md"]


@pytest.mark.parametrize("name", ["correctness", "kernels"])
def test_every_kernels_row_is_saved_as_it_is_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a GPU does but the GPU's: as rehearsed, in this process."""
    monkeypatch.setattr(sampling, "WAYS", 256)  # few passes
    saved: list[str] = []
    found = gpu.STAGES[name].run(gpu_engine.SCALES["cpu"], lambda so_far: saved.append(json.dumps(so_far)))
    assert [row["kernel"] for row in found["rows"]] == list(CASES)
    rows = [json.loads(text)["rows"] for text in saved[: 2 * len(CASES)]]
    assert [len(r) for r in rows] == [n for n in range(1, len(CASES) + 1) for _ in range(2)]
    assert [gpu.UNDER_WAY in r[-1].get("failed", "") for r in rows] == [True, False] * len(CASES)
    assert gpu.whole(found), found
    report = gpu.report({name: found | {"took_s": 1.0}})
    assert all(f"| {kernel} |" in report for kernel in CASES)
    if name == "kernels":
        assert {row["timed_in"] for row in found["rows"]} == {"rehearsed"}
    else:
        assert found["same_in_any_batch"].keys() == {"paged_attention", "int8_matmul", "add_rms_norm", "sampling"}
        checks = [json.loads(text)["checks"] for text in saved[2 * len(CASES) :]]
        assert [gpu.UNDER_WAY in c[-1].get("failed", "") for c in checks] == [True, False] * 2
        assert "- failed" not in report


def test_a_row_that_leaves_the_device_unusable_ends_its_process_and_the_next_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel's access out of bounds is the answer to all that a process asks of CUDA from then on."""
    monkeypatch.setattr(gpu, "_usable", lambda: False)
    tried: list[tuple[str, dict[str, Any]]] = [("a", {}), ("b", {"batch": 3}), ("c", {})]
    found: dict[str, Any] = {}
    ran: list[str] = []

    def one(name: str, changes: dict[str, Any]) -> dict[str, Any]:
        ran.append(name)
        if name == "b":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return {"kernel": name, "ok": True}

    with pytest.raises(SystemExit, match="answers no more"):
        list(gpu._each(tried, one, found))
    found = json.loads(json.dumps(found))
    assert ran == ["a", "b"]
    list(gpu._each(tried, one, found))
    assert ran == ["a", "b", "c"]
    said = "b {'batch': 3}: RuntimeError: CUDA error: an illegal memory access was encountered"
    assert [row.get("failed", "") for row in found["rows"]] == ["", said, ""]
    assert not gpu.whole(found)


def test_a_row_that_fails_on_a_device_that_still_answers_is_followed_in_the_same_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu, "_usable", lambda: True)
    found: dict[str, Any] = {}

    def one(name: str, changes: dict[str, Any]) -> dict[str, Any]:
        if name == "a":
            raise ValueError("no such tile")
        return {"kernel": name, "ok": True}

    list(gpu._each([("a", {}), ("b", {})], one, found))
    assert [row.get("failed") for row in found["rows"]] == ["a {}: ValueError: no such tile", None]


def right_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every kernel, nothing being launched."""
    row = {"shape": "s", "error": 0.0, "allowed": 1.0, "ok": True}
    monkeypatch.setattr(bench, "correct", lambda name, *of: {"kernel": name} | row)


@pytest.mark.parametrize("usable", [True, False])
def test_a_check_that_fails_keeps_its_reason_and_is_no_kernel_that_differs(
    usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that leaves the device unusable is not tried again in the process that goes on."""
    right_rows(monkeypatch)

    def check(device: object, dtype: object) -> dict[str, bool]:
        raise RuntimeError("no such tile\nand more")

    check.__name__ = "_same_in_any_batch"
    monkeypatch.setattr(gpu, "_same_in_any_batch", check)
    monkeypatch.setattr(gpu, "_attention_in_any_batch", lambda device, dtype: {"paged_attention": True})
    monkeypatch.setattr(gpu, "_usable", lambda: usable)
    saved: list[str] = []

    def correctness(*found: dict[str, Any]) -> dict[str, Any]:
        return gpu.correctness(gpu_engine.SCALES["cpu"], lambda so_far: saved.append(json.dumps(so_far)), *found)

    if usable:
        found = correctness()
    else:
        with pytest.raises(SystemExit, match="answers no more"):
            correctness()
        found = correctness(json.loads(saved[-1]))
    assert found["same_in_any_batch"] == {"paged_attention": True}
    said = "_same_in_any_batch: RuntimeError: no such tile\nand more"
    assert [c.get("failed") for c in found["checks"]] == [said, None]
    assert not gpu.whole(found)
    written = gpu.report({"correctness": found | {"took_s": 1.0}})
    assert (
        "the row in a batch: paged_attention yes.\n\n- failed: _same_in_any_batch: RuntimeError: no such tile\n"
        in written
    )


def test_a_check_that_kills_its_process_is_blamed_and_the_other_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right_rows(monkeypatch)
    place = tmp_path / "result.json"
    monkeypatch.setattr(gpu, "_same_in_any_batch", lambda device, dtype: pytest.fail("tried again"))
    monkeypatch.setattr(gpu, "_attention_in_any_batch", lambda device, dtype: {"paged_attention": True})
    under_way = {"failed": f"_same_in_any_batch: {gpu.UNDER_WAY}", "ok": False}
    rows = [bench.correct(name, bench.TINY, torch.device("cpu")) for name in CASES]
    gpu.save(place, {"rows": rows, "same_in_any_batch": {}, "checks": [under_way]})
    assert gpu._blame(place, "exit code -11: about to fall") == len(CASES) + 1
    found = gpu.correctness(gpu_engine.SCALES["cpu"], lambda so_far: None, gpu._result(place, ""))
    assert found["same_in_any_batch"] == {"paged_attention": True}
    blamed = "_same_in_any_batch: its process ended before it did: exit code -11: about to fall"
    assert [c.get("failed") for c in found["checks"]] == [blamed, None]
    written = gpu.report({"correctness": found | {"took_s": 1.0}})
    assert f"- failed: {blamed}" in written
    assert "**no**" not in written


def test_a_row_that_kills_its_process_is_blamed_and_the_others_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows, of which the second is a segmentation fault; that of a stage that cannot go on is its end."""
    program = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from kernels import gpu
place = Path(sys.argv[sys.argv.index("--result") + 1])
found = gpu._result(place, "")
def one(name, changes):
    if name == "b":
        print("about to fall", flush=True)
        os.kill(os.getpid(), 11)
    return {{"kernel": name, "ok": True}}
for _ in gpu._each([("a", {{}}), ("b", {{}}), ("c", {{}})], one, found):
    gpu.save(place, found)
"""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}{program}")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    place = tmp_path / "result.json"
    end = time.monotonic() + 120
    assert gpu._in_processes("kernels", True, end, place, str(tmp_path)) == ""
    rows = gpu._result(place, "")["rows"]
    blamed = "b {}: its process ended before it did: exit code -11: about to fall\n"
    assert [row.get("failed") for row in rows] == [None, blamed, None]
    place.unlink()
    assert gpu._in_processes("ceilings", True, end, place, str(tmp_path)).startswith("exit code -11")
    assert len(gpu._result(place, "")["rows"]) == 2
    assert gpu._in_processes("kernels", True, time.monotonic(), place, str(tmp_path)) == "no time left"


def test_a_load_or_a_way_of_batching_that_fails_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def server(scale: gpu_engine.Scale, model: Path, more: list[str]) -> Iterator[str]:
        if "dynamic" in more:
            raise RuntimeError("the engine did not start: no\nmore")
        yield "url"

    def load(scale: gpu_engine.Scale, url: str, concurrency: str) -> list[dict[str, Any]]:
        if concurrency == "1":
            raise RuntimeError("llm-bench run exited with 1")
        return [{"load": f"c={concurrency}", "state": "stationary", "tpot_p50": None}]

    monkeypatch.setattr(gpu_engine, "_model", lambda scale: nullcontext(Path()))
    monkeypatch.setattr(gpu_engine, "_server", server)
    monkeypatch.setattr(gpu_engine, "_load", load)
    scale = gpu_engine.SCALES["cpu"]
    found = {"engine": gpu_engine.engine(scale, lambda so_far: None)}
    found["batching"] = gpu_engine.batching(scale, lambda so_far: None)
    assert [row.get("ok", True) for row in found["engine"]["cells"]] == [False, True]
    assert [found["batching"][way][0].get("ok", True) for way in gpu_engine.BATCHING] == [True, False, True]
    assert not any(gpu.whole(result) for result in found.values())
    written = gpu.report({name: result | {"took_s": 1.0} for name, result in found.items()})
    assert "| c=1 failed: RuntimeError: llm-bench run exited with 1 |" in written
    assert "| dynamic, c=4 failed: RuntimeError: the engine did not start: no |" in written
    assert "| static, c=4 |" in written


def test_a_slow_call_is_timed_fewer_times() -> None:
    card = bench.rehearsal()._replace(stopwatch=lambda: lambda: 0.4e6, warm=3, replays=20)
    assert bench._time([lambda: None] * 2, card) == Timing(0.2e6, 0.2e6, 0.2e6, 2, "rehearsed", 3)
    card = card._replace(stopwatch=lambda: lambda: 10.0)
    assert bench._time([lambda: None], card).replays == 20


def test_what_the_engine_wants_is_asked_for_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.missing() == []
    monkeypatch.setattr(gpu, "NEEDED", ("json", "no_such_module"))
    monkeypatch.setattr(gpu, "run", lambda *of: 0)
    assert gpu.main(["--rehearse", "--out", str(tmp_path)]) == 0
    said = "kernels.gpu: not installed: no_such_module; answers, engine and batching will fail"
    assert capsys.readouterr().err.startswith(said)


def test_each_way_of_batching_is_saved_as_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    @contextmanager
    def server(scale: gpu_engine.Scale, model: Path, more: list[str]) -> Iterator[str]:
        asked.append(more)
        yield "url"

    monkeypatch.setattr(gpu_engine, "_model", lambda scale: nullcontext(Path()))
    monkeypatch.setattr(gpu_engine, "_server", server)
    monkeypatch.setattr(gpu_engine, "_load", lambda scale, url, c: [{"load": f"c={c}", "state": "stationary"}])
    saved: list[list[str]] = []
    found = gpu_engine.batching(gpu_engine.SCALES["cuda"], lambda so_far: saved.append(list(so_far)))
    assert saved == [["static"], ["static", "dynamic"], ["static", "dynamic", "continuous"]]
    assert asked == [["--batching", way, "--max-num-seqs", "32"] for way in saved[-1]]
    assert "| dynamic, c=32 |" in gpu.report({"batching": found | {"took_s": 1.0}})


def test_a_step_is_set_beside_its_floor() -> None:
    """1 GB at 1,000 GB/s is a millisecond."""
    assert gpu_engine.beside_floor({"tpot_p50": 1.25}, 10**9, 1000.0)["times_floor"] == pytest.approx(1.25)
    for cell, rate in (({"tpot_p50": None}, 1000.0), ({"tpot_p50": 1.25}, None)):
        assert gpu_engine.beside_floor(cell, 10**9, rate) == {"step_floor_bytes": 10**9}


def test_without_a_gpu_the_script_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    assert "no GPU" in capsys.readouterr().err
    assert gpu.main(["--rehearse", "--only", "warp"]) == 2
    assert "--only 'warp'; would be right: environment" in capsys.readouterr().err


def test_an_interrupted_script_says_where_its_results_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*of: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "run", run)
    assert gpu.main(["--rehearse", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err == f"kernels.gpu: interrupted; what was measured is in {tmp_path}\n"


def test_one_wrong_row_makes_a_stage_not_whole() -> None:
    right = {"rows": [{"kernel": "k", "shape": "s", "error": 0.1, "allowed": 0.2, "ok": True}], "took_s": 1.0}
    right["same_in_any_batch"] = {"k": True}
    assert gpu.whole(right)
    for broken in (
        right | {"rows": [right["rows"][0] | {"ok": False}]},  # type: ignore[index]
        right | {"same_in_any_batch": {"k": False}},
        right | {"rows": [bench.kept(lambda: 1 // 0)]},  # type: ignore[arg-type, return-value]
        {"failed": "exit code 1: no", "took_s": 1.0},
    ):
        assert not gpu.whole(broken)
        assert "NOT whole" in gpu.report({"correctness": broken})
    assert "whole, 1.0 s" in gpu.report({"correctness": right})


def test_a_random_model_is_as_large_as_it_says(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    shape = random_model.SMALL
    random_model.write(tmp_path, shape, torch.bfloat16, torch.device("cpu"))
    tensors = load_file(tmp_path / "model.safetensors")
    assert sum(t.numel() * 2 for t in tensors.values()) == shape.weight_bytes(2)
    assert len(json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]) == shape.vocab


def test_the_floor_of_a_step_of_llama_1b() -> None:
    """1.2358 billion parameters, 32 KiB of keys and values a token."""
    assert random_model.LLAMA_1B.weight_bytes(1) == 1_235_814_400
    assert random_model.LLAMA_1B.kv_bytes(2) == 32 * 1024
    scale = gpu.SCALES["cuda"]
    one, many = gpu_engine.step_bytes(scale, 1), gpu_engine.step_bytes(scale, 128)
    mean = (many - one) / 127 / 32 / 1024
    assert 300 < mean < 600  # a prompt of 245 in the median, more in the mean, and half an answer


def test_errors_are_relative_to_the_largest_right_value() -> None:
    case = CASES["swiglu"](bench.TINY)._replace(
        make=lambda device: {}, ours=lambda i: torch.tensor([1.0, 8.5]), exact=lambda i: torch.tensor([1.0, 10.0])
    )
    assert cases.error(case, torch.device("cpu")) == pytest.approx(0.15)
    with pytest.raises(ValueError, match=r"\[2\]; would be right: \[1\]"):
        cases.error(case._replace(exact=lambda i: torch.ones(1)), torch.device("cpu"))

"""ServeGen folders: what they say is what is generated, and what they cannot say is refused with file and line."""

import json
import math
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_bench.errors import BenchError
from llm_bench.request import Request
from llm_bench.servegen import ClientModel, Pmf, Window, arrivals, generate, read_folder, weibull_shape

SHARED = Path(__file__).parents[2] / "shared" / "traces" / "servegen_deepseek-r1"
PROMPTS = Pmf(np.array([10, 100, 1000]), np.array([0.5, 0.3, 0.2]))
ANSWERS = Pmf(np.array([1, 50]), np.array([0.25, 0.75]))


def window(start_s: float, end_s: float, rate: float, cv: float, pattern: str) -> Window:
    lengths = (PROMPTS, ANSWERS) if rate else (None, None)
    return Window(start_s, end_s, rate, cv, pattern if rate else "", (0.0, 0.0), *lengths)


def client(name: str, *windows: tuple[float, float, str], each_s: float = 600.0) -> ClientModel:
    """Windows of each_s, one after the other: (rate, CV, pattern)."""
    return ClientModel(name, tuple(window(i * each_s, (i + 1) * each_s, *w) for i, w in enumerate(windows)))


def within(found: float, expected: float, error: float) -> bool:
    """4 standard errors: a sound generator fails once in 16,000 seeds, and the seed is fixed."""
    return abs(found - expected) < 4 * error


# -- generating -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["Gamma", "Weibull"])
@pytest.mark.parametrize("cv", [0.4, 1.0, 2.5])
def test_rate_cv_and_lengths_are_the_models(pattern: str, cv: float) -> None:
    requests = generate([client("0", (50.0, cv, pattern))], duration_s=600, seed=7)
    n = len(requests)
    assert within(n, 30_000, cv * math.sqrt(30_000))  # variance of a renewal count over a long time: CV² × rate × time
    gaps = np.diff([r.at_s for r in requests])
    assert within(gaps.mean(), 1 / 50, cv / 50 / math.sqrt(n))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.06)
    for lengths, pmf in (([r.tokens_in for r in requests], PROMPTS), ([r.tokens_out for r in requests], ANSWERS)):
        deviation = math.sqrt((pmf.tokens**2) @ pmf.probability - pmf.mean**2)
        assert within(float(np.mean(lengths)), pmf.mean, deviation / math.sqrt(n))
        assert set(lengths) == set(pmf.tokens.tolist())
    assert PROMPTS.mean == 10 * 0.5 + 100 * 0.3 + 1000 * 0.2


@pytest.mark.parametrize("pattern", ["Gamma", "Weibull"])
def test_short_windows_of_bursty_clients_keep_their_rate(pattern: str) -> None:
    """Ten mean gaps of CV 4: a process that began with a whole gap would have 7.5 arrivals too many."""
    rng = np.random.Generator(np.random.PCG64(3))
    counts = [len(arrivals(pattern, 2.0, 4.0, 5.0, rng)) for _ in range(3000)]
    assert within(float(np.mean(counts)), 10, float(np.std(counts)) / math.sqrt(3000))


def test_gaps_without_variation_are_equal() -> None:
    times = arrivals("Gamma", 4.0, 0.0, 10.0, np.random.Generator(np.random.PCG64(0)))
    assert len(times) == 40 and np.allclose(np.diff(times), 0.25) and 0 <= times[0] < 0.25


@settings(deadline=None)
@given(
    st.sampled_from(["Gamma", "Weibull"]),
    st.floats(0.01, 200),
    st.floats(0, 6),
    st.floats(0.01, 50),
    st.integers(0, 2**32),
)
def test_arrivals_are_sorted_and_inside(pattern: str, rate: float, cv: float, length_s: float, seed: int) -> None:
    times = arrivals(pattern, rate, cv, length_s, np.random.Generator(np.random.PCG64(seed)))
    assert (np.diff(times) >= 0).all() and ((times >= 0) & (times < length_s)).all()


def test_a_rate_is_reached_by_scaling_all_clients_alike() -> None:
    clients = [
        client("0", (3.0, 1.0, "Gamma"), (0.0, 0.0, "")),
        client("1", (1.0, 1.0, "Weibull"), (2.0, 1.0, "Gamma")),
    ]
    requests = generate(clients, duration_s=1200, rate=30.0, seed=1)
    assert within(len(requests), 36_000, math.sqrt(36_000))  # CV 1: Poisson
    # of 3 + 1 + 2 = 6 parts, the first window has four, and client 0 three
    assert within(sum(r.at_s is not None and r.at_s < 600 for r in requests), 24_000, math.sqrt(24_000))
    assert within(sum(r.client == "0" for r in requests), 18_000, math.sqrt(18_000))
    assert not any(r.client == "0" and r.at_s is not None and r.at_s >= 600 for r in requests)


def test_a_span_begins_at_its_start_and_windows_are_cut_by_it() -> None:
    requests = generate([client("0", (100.0, 0.5, "Gamma"), (10.0, 0.5, "Gamma"))], duration_s=120, start_s=540, seed=2)
    times = np.array([r.at_s for r in requests])
    assert times[0] >= 0 and times[-1] < 120 and (np.diff(times) >= 0).all()
    assert within(float((times < 60).sum()), 6000, 0.5 * math.sqrt(6000))
    assert within(float((times >= 60).sum()), 600, 0.5 * math.sqrt(600))


def test_a_seed_is_one_trace_and_a_clients_part_of_it_is_its_own() -> None:
    both = [client("0", (5.0, 2.0, "Gamma")), client("1", (5.0, 2.0, "Weibull"))]
    requests = generate(both, duration_s=100, seed=11)
    assert requests == generate(both, duration_s=100, seed=11) != generate(both, duration_s=100, seed=12)
    alone: list[Request] = generate(both[1:], duration_s=100, seed=11)
    assert alone == [r for r in requests if r.client == "1"]
    twins = generate([client("0", (5.0, 1.0, "Gamma")), client("1", (5.0, 1.0, "Gamma"))], duration_s=100, seed=11)
    assert len({r.at_s for r in twins}) == len(twins), "clients of one model do not send at the same moments"


@pytest.mark.parametrize("cv", [0.01, 0.5, 1.0, 1.3, 4.0, 100.0])
def test_weibull_shape_has_the_cv(cv: float) -> None:
    k = weibull_shape(cv)
    assert math.sqrt(math.exp(math.lgamma(1 + 2 / k) - 2 * math.lgamma(1 + 1 / k)) - 1) == pytest.approx(cv, rel=1e-6)
    assert weibull_shape(1.0) == pytest.approx(1)  # the exponential distribution


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"duration_s": 1300.0}, "client 0: windows from 0 to 1200 s, asked for 0 to 1300 s"),
        ({"duration_s": 60.0, "start_s": 700.0}, "no client sends anything from 700 to 760 s"),
        ({"duration_s": 0.0}, "expected a span"),
        ({"duration_s": math.nan}, "expected a span"),
        ({"duration_s": 60.0, "rate": 0.0}, "more than 0"),
        ({"duration_s": 60.0, "rate": 1e9}, "20,000,000 at most"),
        ({"duration_s": 60.0, "seed": -1}, "seed of 0 or more"),
    ],
)
def test_what_cannot_be_generated_is_refused(kwargs: dict[str, float], words: str) -> None:
    model = client("0", (1.0, 1.0, "Gamma"), (0.0, 0.0, ""))
    with pytest.raises(BenchError, match=words):
        generate([model], **{"seed": 1, **kwargs})  # type: ignore[arg-type]


# -- reading ----------------------------------------------------------------------------------------------------------

TRACE = "0,0.5,2.0,Gamma,0.25,8.0\n600,0,0,,0,0\n1200,1.5,0.5,Weibull,2.1,0.75\n"
DATASET = {
    "0": {"input_tokens": "{10: 0.25, 20: 0.75}", "output_tokens": "{7: 1.0}", "reason_ratio": "{0.5: 1.0}"},
    "1200": {"input_tokens": "{}", "output_tokens": "{}", "reason_ratio": "{}"},
}


def folder(path: Path, trace: str = TRACE, dataset: object = DATASET) -> Path:
    (path / "chunk-3-trace.csv").write_text(trace)
    (path / "chunk-3-dataset.json").write_text(dataset if isinstance(dataset, str) else json.dumps(dataset, indent=1))
    return path


def test_a_folder_is_read_as_upstream_reads_it(tmp_path: Path) -> None:
    (model,) = read_folder(folder(tmp_path))
    assert model.client == "3"
    assert [w[:6] for w in model.windows] == [
        (0, 600, 0.5, 2.0, "Gamma", (0.25, 8.0)),
        (600, 1200, 0.0, 0.0, "", (0.0, 0.0)),
        (1200, 1800, 1.5, 0.5, "Weibull", (2.1, 0.75)),
    ]
    first, silent, last = model.windows
    assert silent.input is None and first.input is not None and first.output is not None
    assert first.input.tokens.tolist() == [10, 20] and first.input.probability.tolist() == [0.25, 0.75]
    assert last.input is first.input, "an empty entry leaves the one before it in force"
    later = {**DATASET, "1200": {"input_tokens": "{30: 1.0}", "output_tokens": "{9: 1.0}"}}
    (model,) = read_folder(folder(tmp_path, dataset=later))
    assert [w.input and w.input.mean for w in model.windows] == [17.5, None, 30.0]
    (model,) = read_folder(folder(tmp_path, dataset={"1200": later["1200"]}))
    assert [w.input and w.input.mean for w in model.windows] == [30.0, None, 30.0], "none before it: the first there is"


@pytest.mark.parametrize(
    ("trace", "line", "words"),
    [
        ("0,1,1,Gamma,1\n", 1, "5 cells, expected 6"),
        ("0,1,1,Gamma,1,1\n600,x,1,Gamma,1,1\n", 2, "could not convert string to float: 'x'"),
        ("0,1,1,Gamma,1,1\n\n600,-1,1,Gamma,1,1\n", 3, "'-1', expected a number, 0 or more"),
        ("0,nan,1,Gamma,1,1\n", 1, "'nan', expected a number, 0 or more"),
        ("0,1,1,Pareto,1,1\n", 1, "pattern 'Pareto', expected Gamma or Weibull"),
        ("600,1,1,Gamma,1,1\n600,1,1,Gamma,1,1\n", 2, "start 600 s after 600 s, expected a later one"),
        ("0,1,1e9,Gamma,1,1\n", 1, "CV 1e\\+09, expected 100 at most"),
        ("1e300,1,1,Gamma,1,1\n", 1, "expected 10 years at most"),
    ],
)
def test_bad_trace_lines_are_named(tmp_path: Path, trace: str, line: int, words: str) -> None:
    with pytest.raises(BenchError, match=words) as e:
        read_folder(folder(tmp_path, trace))
    assert str(e.value).startswith(f"{tmp_path / 'chunk-3-trace.csv'}:{line}: ")


def entry(literal: object) -> dict[str, object]:
    return {"0": {"input_tokens": "{1: 1.0}", "output_tokens": literal}}


@pytest.mark.parametrize(
    ("dataset", "line", "words"),
    [
        (entry("__import__('os').system('true')"), 4, "expected a dict like"),
        (entry("{" * 100_000), 4, "expected a dict like"),
        (entry("{1: " + "-" * 100_000 + "1}"), 4, "expected a dict like"),
        (entry("{1: 1.0, " + "2: 0.0, " * 600_000 + "}"), 4, "4,800,010 characters, expected 4,194,304 at most"),
        (entry("{1: 1.2.3}"), 4, "not a Python dict: SyntaxError"),
        (entry("{1: 0.5, 2: 0.4}"), 4, "expected some of sum 1"),
        (entry("{1: 1e308, 2: 1e308}"), 4, "expected some of sum 1"),
        (entry("{0: 1.0}"), 4, "0 to 0 tokens, expected 1 to"),
        (entry("{999999999: 1.0}"), 4, "tokens, expected 1 to"),
        (entry({"1": 1.0}), 4, "is a dict, expected the text of a dict"),
        ({"0": {"input_tokens": "{1: 1.0}"}}, 3, "output_tokens of start 0 is a NoneType"),
        ({"0": []}, 2, "start 0 has a list, expected an object"),
        ({"noon": {}}, 2, "could not convert string to float: 'noon'"),
        ({"0": {**DATASET["0"], "image_tokens": "{}"}}, 2, "image_tokens"),
        ("[]", 1, "a JSON list, expected an object"),
        ('{"0":\n}', 2, "not JSON"),
        ("[" * 200_000, 1, "nested too deeply"),
    ],
)
def test_bad_datasets_are_named(tmp_path: Path, dataset: object, line: int, words: str) -> None:
    with pytest.raises(BenchError, match=words) as e:
        read_folder(folder(tmp_path, dataset=dataset))
    assert str(e.value).startswith(f"{tmp_path / 'chunk-3-dataset.json'}:{line}: ")
    assert len(str(e.value)) < 600


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot be read: No such file"):
        read_folder(tmp_path / "nowhere")
    with pytest.raises(BenchError, match=r"no chunk-N-trace\.csv in it"):
        read_folder(tmp_path)
    (folder(tmp_path) / "chunk-3-dataset.json").unlink()
    with pytest.raises(BenchError, match=r"chunk-3-dataset\.json: missing"):
        read_folder(tmp_path)
    (tmp_path / "chunk-3-dataset.json").write_bytes(b"\xff")
    with pytest.raises(BenchError, match="byte 0 is not UTF-8"):
        read_folder(tmp_path)
    folder(tmp_path, "0,1,1,Gamma,1,1\n")
    with pytest.raises(BenchError, match="1 windows, expected two or more"):
        read_folder(tmp_path)
    folder(tmp_path, dataset={})
    with pytest.raises(BenchError, match=r"trace.csv:1: a rate of 0.5, but its dataset has no lengths"):
        read_folder(tmp_path)


@settings(deadline=None)
@given(st.text(alphabet="0123456789{}:,. e-+'\"[]()\n\\", max_size=60))
def test_no_literal_ends_in_a_traceback(tmp_path_factory: pytest.TempPathFactory, literal: str) -> None:
    path = tmp_path_factory.mktemp("folder")
    with suppress(BenchError):
        read_folder(folder(path, dataset=entry(literal)))


@pytest.mark.skipif(not SHARED.exists(), reason="the shared traces are not beside this tree")
def test_published_clients() -> None:
    clients = read_folder(SHARED)
    assert [c.client for c in clients] == ["0", "1"] and [len(c.windows) for c in clients] == [144, 144]
    recorded = sum(w.rate * (w.end_s - w.start_s) for c in clients for w in c.windows)
    requests = generate(clients, duration_s=86_400, seed=1)
    assert within(len(requests), recorded, 2 * math.sqrt(recorded))  # CVs of 0.8 to 6.7, nearly all about 1
    peak = [w for c in clients for w in c.windows if w.pattern == "Weibull"]
    assert len(peak) == 11
    for w in peak:  # upstream fitted shapes by likelihood: near the CV's, and not it
        assert weibull_shape(w.cv) == pytest.approx(w.params[0], rel=0.09)

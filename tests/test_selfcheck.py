"""What `selfcheck` says and keeps: a table that fits, a warning on a busy machine, a cache that may hold anything."""

import json

import pytest
from typer.testing import CliRunner

from llm_bench import __version__, calibration, cli, selfcheck
from llm_bench.host import host
from llm_bench.plan import Load
from llm_bench.selfcheck import Found

IDLE = Found((0.05, 0.4), (0.01, 0.2), (0.02, 0.3), 0.0123, 9_000.0, 90_000.0, 0.3, 20.0, 100, 0)
SLOW = Found(
    (12.34, 1134.56), (99.994, 123_456.7), (0.1, 98_765.4), 0.1234, 123_456.0, 1_234_567.0, 1.0, 20.1, 9, 10_000
)
LADDER = {f"{n} streams": selfcheck.Step(Load(concurrency=n), 2 * n, 64, 50.0, 20.0) for n in (64, 128, 256)}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("value", [
    "0", "-5", "NaN", "Infinity", "1e-300", '"12"', "[]", "null", "true", "{}", "1" + "0" * 400, "1" + "0" * 5000,
])  # fmt: skip
def test_a_ceiling_of_nonsense_is_none(cache, value):
    assert calibration.ceiling() is None
    calibration.save({}, {"events_per_s": 10.0, "requests_per_s": 5.0})
    sound = calibration.store().read_text()
    assert calibration.ceiling() == {"events_per_s": 10.0, "requests_per_s": 5.0}
    calibration.store().write_text(sound.replace("10.0", value))
    assert calibration.ceiling() is None


@pytest.mark.parametrize("text", [b"", b"{{{", b"[" * 100_000, b"\xff", b"3", b"null", b"[]", b'{"version": []}'])
def test_a_cache_of_garbage_is_none(cache, text):
    calibration.save({}, {"events_per_s": 10.0, "requests_per_s": 5.0})
    calibration.store().write_bytes(text)
    assert calibration.ceiling() is None


def test_a_cache_of_another_shape_is_none(cache):
    calibration.save({}, {"events_per_s": 10.0, "requests_per_s": 5.0})
    for document in ({"host": 3}, {"host": host()}, {"host": host(), "ceiling": [1]}):
        calibration.store().write_text(json.dumps({"version": __version__} | document))
        assert calibration.ceiling() is None


@pytest.mark.parametrize(("found", "load_average", "said"), [
    (IDLE, 0.3, ""), (IDLE, None, ""), (IDLE, 1.9, "load average before was 1.9 on 2 cores"),
    (IDLE._replace(gap_error_ms=(0.1, 7.25)), 0.3, "a p99 error of 7.2 ms is over 5 ms"),
    (IDLE._replace(ttft_error_ms=(0.1, 1134.0), gap_error_ms=None), 0.3, "a p99 error of 1,134.0 ms"),
])  # fmt: skip
def test_a_busy_machine_is_told_so(found, load_average, said):
    text = selfcheck.busy({"a": found, "b": IDLE._replace(ttft_error_ms=None)}, load_average, 2)
    assert said in text
    assert bool(text) is bool(said)
    assert text.endswith("repeat this when it is idle") is bool(said)


@pytest.mark.parametrize(("changed", "carried", "why"), [
    ({}, 256, ""),
    ({"failed": 3}, 128, "at 256 3 requests failed"),
    ({"served_itl_ms": 22.0}, 128, "at 256 the null target itself fell behind (22.0 ms a token)"),
    ({"cpu_share": 0.91}, 128, "at 256 this client used 91% of a core"),
    ({"gap_error_ms": (0.1, 9.0)}, 128, "at 256 stamps were up to 9.0 ms late (p99)"),
])  # fmt: skip
def test_the_ceiling_of_streams_is_the_last_step_that_was_carried_well(changed, carried, why):
    found = dict.fromkeys(LADDER, IDLE) | {"256 streams": IDLE._replace(**changed)}
    assert selfcheck.streams(found, LADDER) == (carried, why)
    others = {"pacing": selfcheck.STEPS["pacing"]}
    assert selfcheck.streams(found | {"pacing": SLOW}, LADDER | others) == (carried, why)


def test_more_streams_are_left_out_once_fewer_were_too_many(cache, monkeypatch):
    monkeypatch.setattr(selfcheck, "MAX_CPU_SHARE", 0.0)
    said = []
    ladder = {f"{n}": selfcheck.Step(Load(concurrency=n), n, 3, 20.0, 5.0) for n in (2, 4)}
    found = selfcheck.run(ladder, said.append, lambda text: None)
    assert list(found) == ["2"]
    assert said[-1].startswith("4: left out, since at 2 this client used ")


def test_the_steps_that_ceilings_are_of_are_measured_on_a_busy_machine_too(cache, monkeypatch):
    monkeypatch.setattr(selfcheck, "MAX_CPU_SHARE", 0.0)
    monkeypatch.setattr(selfcheck, "_step", lambda *asked: SLOW)
    found = selfcheck.run(selfcheck.STEPS, lambda text: None, lambda text: None)
    assert set(selfcheck.FLOOR) <= set(found) < set(selfcheck.STEPS)
    assert "A core carries 1,234,567 events/s" in selfcheck.summary(found, selfcheck.STEPS)


def _selfcheck(monkeypatch, found, busy=""):
    monkeypatch.setattr(selfcheck, "busy", lambda *facts: busy)
    monkeypatch.setattr(selfcheck, "run", lambda steps, say, live: found)
    return CliRunner().invoke(cli.app, ["selfcheck"])


def test_the_table_fits_80_columns_and_cuts_no_number(cache, monkeypatch):
    done = _selfcheck(monkeypatch, dict.fromkeys(selfcheck.STEPS, SLOW))
    table = done.stdout.partition("Errors and lag")[0]
    assert "One worker carries 0 streams of 50 tokens/s; at 1 10,000 requests failed." in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "…" not in table
    numbers = ("12.34", "1,135", "99.99", "123,457", "98,765", "0.1234", "123,456", "1,234,567", "10,000")
    assert [n for n in numbers if table.count(n) < len(selfcheck.STEPS)] == []
    assert [name for name in selfcheck.STEPS if name not in table] == []


def test_the_table_is_shown_where_it_cannot_be_kept(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    done = _selfcheck(monkeypatch, dict.fromkeys(selfcheck.STEPS, IDLE))
    assert "90,000" in done.stdout
    assert done.exit_code != 0
    assert "cannot be kept" in str(done.exception)
    assert "XDG_CACHE_HOME" in str(done.exception)


def test_a_step_is_measured_as_a_cell_is(cache):
    found = selfcheck.run({"few": selfcheck.Step(Load(concurrency=2), 6, 4, 20.0, 5.0)}, print, lambda text: None)
    assert (found["few"].ok, found["few"].failed) == (6, 0)
    assert len(selfcheck.rows(found)[0]) == len(selfcheck.HEADINGS)


def test_what_a_busy_machine_shows_is_shown_and_not_kept(cache, monkeypatch):
    done = _selfcheck(monkeypatch, dict.fromkeys(selfcheck.STEPS, SLOW), "this machine was busy")
    assert done.exit_code == 3
    assert "1,234,567" in done.stdout
    assert calibration.ceiling() is None

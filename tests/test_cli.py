"""The command line at its edges: numbers without meaning, outputs that cannot be written, signals before the load."""

import signal
import subprocess
import time
import typing

import pytest
from typer.testing import CliRunner

from llm_bench import __version__, cli_canary, cli_capacity, cli_search, cli_trace
from llm_bench.cli import app, targets_app
from llm_bench.errors import BenchError
from llm_bench.options import LIMITS
from tests.bench import bench, command, environment, good, llm_server, rows, trace_file
from tests.scripted import Scripted, deaf, http_response, unused_port

NEEDS = {"rate": [], "concurrency": [], "burstiness": ["--rate", "5"], "max_in_flight": ["--rate", "5"]}


def option_of(name):
    return "--" + {"from_s": "from", "to_s": "to"}.get(name, name).replace("_", "-")


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_every_number_of_every_command_has_its_limits():
    functions = [c.callback for group in (app, targets_app, cli_trace.app) for c in group.registered_commands]
    numbers = {
        name
        for function in functions
        for name, kind in typing.get_type_hints(function).items()
        if kind in (int, float, int | None, float | None)
    }
    assert len(numbers) > 15
    own = (cli_canary, cli_capacity, cli_trace, cli_search)
    assert numbers <= set(LIMITS).union(*(module.LIMITS for module in own))


@pytest.mark.parametrize("value", ["below", "above", "nan", "inf", "-inf", "1e999"])
@pytest.mark.parametrize("name", LIMITS)
def test_a_number_outside_its_limits_is_refused_before_anything_is_looked_at(name, value):
    least, most = LIMITS[name]
    value = {"below": least - 1, "above": most * 2 + 1}.get(value, value)
    option = option_of(name)
    target = f"t=http://127.0.0.1:{unused_port()}/v1"
    load = NEEDS.get(name, ["--concurrency", "1"] if name not in ("speed", "seed") else [])
    got = invoke("run", "--targets", target, "--trace", "no-such-trace", *load, f"{option}={value}")
    if isinstance(got.exception, BenchError):
        assert got.exception.exit_code == 2
        assert option in str(got.exception)
    else:
        assert got.exit_code == 2, got.exception  # typer's own word: no number at all
        assert option in got.output


@pytest.mark.parametrize("name", LIMITS)
def test_the_limits_themselves_are_allowed(name):
    option = option_of(name)
    load = NEEDS.get(name, ["--concurrency", "1"] if name not in ("speed", "seed") else [])
    for value in LIMITS[name]:
        got = invoke("run", "--targets", "reference", "--trace", "no-such-trace", *load, option, value)
        assert "no-such-trace" in str(got.exception), got.exception


def test_a_negative_warmup_does_not_dilute_a_rate_but_stops_the_run(tmp_path):
    with Scripted(llm_server(lambda n, seen: good(seen))) as server:
        ran = bench(server.url, tmp_path, trace_file(tmp_path, rows(20)), "--rate", "50", "--warmup", "-10")
    assert ran.rc == 2
    assert ran.err == "llm-bench: --warmup -10.0: expected a number from 0 to 1,000,000\n"
    assert not server.requests


def test_a_named_file_of_targets_has_to_be_there(tmp_path):
    ran = bench("http://127.0.0.1:1/v1", tmp_path, trace_file(tmp_path, rows(1)), "--targets-file", "gone.toml")
    assert (ran.rc, ran.err) == (2, "llm-bench: --targets-file gone.toml: there is no such file\n")


def test_the_version_is_printed():
    done = invoke("--version")
    assert (done.exit_code, done.output) == (0, f"llm-bench {__version__}\n")


def test_no_line_of_the_list_of_commands_is_cut():
    for arguments in (("--help",), ("targets", "--help")):
        assert "..." not in invoke(*arguments).output.partition("Commands:")[2]


def test_run_help_says_what_happens_without_a_load_and_where_metrics_are_listed():
    text = " ".join(invoke("run", "--help").output.split())
    assert "Without --concurrency, --rate or --replay the trace is replayed" in text
    assert "Metrics are listed in docs/reference.md" in text


def test_the_engines_help_has_the_name_of_the_command():
    done = subprocess.run(command("serve", "--help"), capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: llm-bench serve ")
    assert "reference_engine" not in done.stdout


# ---- outputs


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    with Scripted(llm_server(lambda n, seen: good(seen))) as server:
        ran = bench(server.url, folder, trace_file(folder, rows(12)), "--concurrency", "1")
    assert ran.rc == 0, ran.err
    return ran.folder


@pytest.mark.parametrize("arguments", [["report", "RUN"], ["--version"], ["--help"]], ids=["report", "version", "help"])
@pytest.mark.parametrize("where", ["/dev/full", "closed"])
def test_an_output_that_cannot_be_written_is_one_sentence(run_folder, where, arguments):
    words = " ".join(command(*(run_folder if a == "RUN" else a for a in arguments)))
    done = subprocess.run(
        ["sh", "-c", f"{words} >&-" if where == "closed" else f"{words} >{where}"],
        stderr=subprocess.PIPE, text=True, check=False, env=environment(),
    )  # fmt: skip
    assert done.returncode == 2, done.stderr  # no verdict on what was measured
    assert done.stderr.startswith("llm-bench: standard output cannot be written: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_report_that_meets_a_full_disk_leaves_nothing(run_folder, tmp_path):
    words = " ".join(command("report", run_folder, "--format", "html", "-o", tmp_path / "r.html"))
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 1; {words}"], capture_output=True, text=True, check=False, env=environment()
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr == f"llm-bench: {tmp_path / 'r.html'}: cannot be written: File too large\n"
    assert list(tmp_path.iterdir()) == []


def test_a_run_whose_report_cannot_be_printed_says_where_its_records_are(tmp_path):
    with Scripted(llm_server(lambda n, seen: good(seen))) as server:
        arguments = ["run", "--targets", f"t={server.url}", "--trace", trace_file(tmp_path, rows(8))]
        words = " ".join(command(*arguments, "--concurrency", "1", "--out", tmp_path / "run"))
        done = subprocess.run(
            ["sh", "-c", f"{words} >/dev/full"], stderr=subprocess.PIPE, text=True, check=False, env=environment()
        )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(f"llm-bench report {tmp_path / 'run'}")
    assert "Traceback" not in done.stderr


def test_a_run_whose_stderr_is_full_is_measured(tmp_path):
    with Scripted(llm_server(lambda n, seen: good(seen))) as server:
        arguments = ["run", "--targets", f"t={server.url}", "--trace", trace_file(tmp_path, rows(8))]
        words = " ".join(command(*arguments, "--concurrency", "1", "--out", tmp_path / "run", "--format", "json"))
        done = subprocess.run(
            ["sh", "-c", f"{words} 2>/dev/full"], stdout=subprocess.PIPE, text=True, check=False, env=environment()
        )
    assert done.returncode == 0
    assert done.stdout.count("\n") == 1


def test_a_terminal_without_unicode_costs_characters_and_not_the_report(run_folder):
    done = subprocess.run(
        command("report", run_folder), capture_output=True, check=False, env=environment(PYTHONIOENCODING="ascii")
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert b"?" in done.stdout


# ---- signals, and targets that do not answer


def started(url, folder, *arguments):
    return subprocess.Popen(
        command("run", "--targets", f"t={url}", "--trace", trace_file(folder, rows(4)), "--concurrency", "1",
                "--out", folder / "run", *arguments),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, env=environment(),
    )  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_signal_during_the_probes_ends_with_a_sentence_and_130(tmp_path, number):
    def answer(order, seen):
        return ["hang"] if seen.method == "POST" else llm_server([])(order, seen)

    with Scripted(answer) as server:
        running = started(server.url, tmp_path)
        deadline = time.monotonic() + 60
        while not any(s.method == "POST" for s in server.requests) and time.monotonic() < deadline:
            time.sleep(0.02)
        running.send_signal(number)
        _, err = running.communicate(timeout=180)
    assert running.returncode == 130
    assert err.splitlines()[-1] == "llm-bench: interrupted; what was measured before is on disk"
    assert "Traceback" not in err


def took_s(url, folder, *arguments):
    begun = time.monotonic()
    running = started(url, folder, *arguments)
    _, err = running.communicate(timeout=90)
    assert running.returncode == 4, err
    assert "Traceback" not in err
    return time.monotonic() - begun, err


START_S = 25.0  # of a Python with httpx on a machine with much else to do, at most; the limits not asked for are longer


def test_a_server_that_accepts_and_never_answers_is_given_up_in_time(tmp_path):
    with Scripted(["hang"]) as server:
        seconds, err = took_s(server.url, tmp_path, "--ready-timeout", "1")
    assert seconds < 2 + START_S
    assert "is not ready after 1 s" in err


def test_a_server_that_drips_its_list_of_models_is_given_up_in_time(tmp_path):
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"
    with Scripted([(0, head), *((50.0 * i, b" ") for i in range(400))]) as server:
        seconds, err = took_s(server.url, tmp_path, "--ready-timeout", "1")
    assert seconds < 2 + START_S
    assert "is not ready after 1 s" in err


def test_a_deaf_port_is_given_up_in_time(tmp_path):
    with deaf() as url:
        seconds, err = took_s(url, tmp_path, "--ready-timeout", "1")
    assert seconds < 2 + START_S
    assert "is not ready after 1 s" in err


def test_https_to_an_http_port_is_given_up_in_time(tmp_path):
    with Scripted(["hang"]) as server:
        seconds, err = took_s(server.url.replace("http:", "https:"), tmp_path, "--ready-timeout", "1")
    assert seconds < 2 + START_S
    assert "is not ready after 1 s" in err


@pytest.mark.parametrize("option", ["--ttft-timeout", "--total-timeout"])
def test_a_probe_is_bound_by_the_time_outs_of_a_request(tmp_path, option):
    def answer(order, seen):
        return ["hang"] if seen.method == "POST" else [(0, http_response(200, b'{"data": [{"id": "m"}]}'))]

    with Scripted(answer) as server:
        seconds, err = took_s(server.url, tmp_path, option, "0.5")
    assert seconds < 1.5 + START_S
    assert "a small probe request failed (ttft_timeout: no answer within 0.5 s)" in err


def test_a_tokenizer_is_looked_at_before_a_target_is_started(tmp_path):
    junk = tmp_path / "tokenizer.json"
    junk.write_text('{"model": {}}')
    done = subprocess.run(
        command("run", "--targets", "null", "--trace", trace_file(tmp_path, rows(4)), "--concurrency", "1",
                "--tokenizer", junk, "--out", tmp_path / "run"),
        capture_output=True, text=True, check=False, cwd=tmp_path, env=environment(),
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith(f"llm-bench: {junk}: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_proxy_of_the_environment_is_not_used_and_that_is_said(tmp_path):
    proxy = f"http://user:sk-secret@127.0.0.1:{unused_port()}"
    trace = trace_file(tmp_path, rows(8))
    with Scripted(llm_server(lambda n, seen: good(seen))) as server:
        ran = bench(server.url, tmp_path, trace, "--concurrency", "1", http_proxy=proxy, no_proxy="")
        (tmp_path / "b").mkdir()
        bypassed = bench(
            server.url, tmp_path / "b", trace, "--concurrency", "1", http_proxy=proxy, no_proxy="127.0.0.1"
        )
    assert ran.rc == bypassed.rc == 0, ran.err
    assert ran.err.count("HTTP_PROXY of the environment is not used") == 1
    assert "sk-secret" not in ran.err
    assert "PROXY" not in bypassed.err


def test_targets_alone_lists_what_can_be_named(tmp_path):
    (tmp_path / "targets.toml").write_text('[targets.mine]\nurl = "http://127.0.0.1:8000/v1"\n')
    done = subprocess.run(
        command("targets"), capture_output=True, text=True, check=False, cwd=tmp_path, env=environment()
    )
    assert done.returncode == 0, done.stderr
    names = ["mine", "reference", "static", "dynamic", "continuous", "null"]
    assert [line.split()[0] for line in done.stdout.splitlines()] == names
    assert "http://127.0.0.1:8000/v1" in done.stdout

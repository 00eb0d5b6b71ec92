"""TorchServe's management port: which model, which version, how many workers, and whether one is ready."""

import json
from pathlib import Path

import pytest

from llm_bench import dialects, probe, probe_management, probe_report, targets
from llm_bench.dialects import DIALECTS
from llm_bench.errors import BenchError, TargetError
from llm_bench.exchange import Timeouts
from llm_bench.targets import Target
from tests.fixtures.protocols import MODEL, serve
from tests.scripted import Scripted, http_response, unused_port


def page(*status, version="2.0", **more):
    """As TorchServe 0.12 describes a model with workers in these states."""
    workers = [{"id": str(9000 + i), "status": one, "pid": 1, "gpu": False} for i, one in enumerate(status)]
    about = {"modelName": MODEL, "modelVersion": version, "minWorkers": 2, "maxWorkers": 2, "batchSize": 4}
    return [about | {"workers": workers, "jobQueueStatus": {"remainingCapacity": 100, "pendingRequests": 0}} | more]


def manager(pages, names=(MODEL,)):
    """Its management API: each request for the model's page has the next of `pages`, the last one from then on."""
    asked = []

    def answer(number, seen):
        if seen.path == "/models":
            models = [{"modelName": name, "modelUrl": f"{name}.mar"} for name in names]
            return [(0, http_response(200, json.dumps({"models": models}).encode()))]
        asked.append(seen.path)
        return [(0, http_response(200, json.dumps(pages[min(len(asked), len(pages)) - 1]).encode()))]

    return answer


def probed(pages, ready_s=5.0, said=None, **facts):
    with Scripted(serve("torchserve")) as server, Scripted(manager(pages)) as port:
        urls = {"url": server.url.removesuffix("/v1"), "management": port.url.removesuffix("/v1")}
        target = Target("t", api="torchserve", **(urls | facts))
        found = probe.probe(target, said.append if said is not None else lambda text: None, ready_s)
    return dict(probe_report.check_rows(target, found)), found


def test_model_version_and_workers_are_told():
    rows, found = probed([page("READY", "READY")])
    assert (found.models, found.model) == ([MODEL], MODEL)  # no name was given
    assert rows["workers"] == "2 of 2 ready, batches of at most 4"
    assert rows["revision"] == "2.0"
    assert rows["engine version"] == "0.12.0"
    assert json.loads(json.dumps(found.public()))["workers"] == found.workers


def test_the_first_worker_is_waited_for():
    said = []
    rows, _ = probed([page("LOADING", "LOADING"), page("LOADING", "READY")], said=said)
    assert rows["workers"] == "1 of 2 ready, batches of at most 4"
    assert any(line.startswith(f"waiting for a worker of {MODEL} at http://") for line in said)


@pytest.mark.parametrize("status", [(), ("LOADING",)])
def test_a_model_without_a_worker_is_one_sentence(status):
    with pytest.raises(TargetError, match=r"no worker of the model 'm' is ready after 0 s \(0 of 2, http.*--model"):
        probed([page(*status)], ready_s=0)


def test_another_version_than_the_declared_one_is_refused():
    with pytest.raises(TargetError, match=r"revision '1\.0' is declared, .* says '2\.0'"):
        probed([page("READY")], revision="1.0")


def test_a_model_that_is_not_loaded_is_named_beside_those_that_are():
    with pytest.raises(TargetError, match="model 'nope' is not among those that it lists: m"):
        probed([page("READY")], model="nope")


def test_a_declared_port_that_does_not_answer_is_an_error_and_a_derived_one_a_note(monkeypatch):
    nobody = f"http://127.0.0.1:{unused_port()}"
    with pytest.raises(TargetError, match=rf"target t: its management API at {nobody}: ConnectError.*its models"):
        probed([page("READY")], management=nobody)
    row = DIALECTS["torchserve"]
    elsewhere = row.site.managed._replace(port=int(nobody.rpartition(":")[2]))  # 8081 of this machine may be taken
    monkeypatch.setitem(DIALECTS, "torchserve", row._replace(site=row.site._replace(managed=elsewhere)))
    dialects._spoken.cache_clear()
    try:
        rows, found = probed([page("READY")], management="", model=MODEL)
    finally:
        dialects._spoken.cache_clear()
    assert "workers" not in rows
    assert any(note.startswith(f"no management API at {nobody} (ConnectError") for note in found.notes)


def test_a_port_that_nobody_named_gets_no_key(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "secret-1234")
    with Scripted(manager([page("READY")])) as port:
        row = DIALECTS["torchserve"]
        managed = row.site.managed._replace(port=port.port)
        beside = row._replace(site=row.site._replace(managed=managed))
        monkeypatch.setattr(Target, "dialect", beside)
        for management in ("", f"http://127.0.0.1:{port.port}"):
            target = Target("t", "http://127.0.0.1:1", api="torchserve", key_env="SOME_KEY", management=management)
            assert probe_management.ask(target, lambda text: None, 5.0, Timeouts(), []).version == "2.0"
    keys = ["authorization" in seen.headers for seen in port.requests]
    assert keys == [False, False, True, True]


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"[5]", b"{}", b"null", b"<html>", b'[{"workers": 5}]', b'[{"workers": [5]}]']
)
def test_any_page_is_a_model_or_none(body):
    managed = DIALECTS["torchserve"].site.managed
    assert managed.loaded(body) is None
    assert managed.listed(body) == []


def test_only_protocols_with_such_a_port_take_its_url(tmp_path):
    flags = {"management": "http://h:8081/", "api": "torchserve"}
    (found,) = targets.parse("t=http://h:8080", tmp_path / "none.toml", flags)
    assert found.management == "http://h:8081"
    with pytest.raises(BenchError, match=r"`management` is of a server .* \(api torchserve\), not of tgi"):
        targets.parse("t=http://h:8080", tmp_path / "none.toml", flags | {"api": "tgi"})
    with pytest.raises(BenchError, match="target t: management: the URL holds a user or key"):
        targets.parse("t=http://h:8080", tmp_path / "none.toml", flags | {"management": "http://u:p@h:1"})


def test_a_query_in_its_url_names_the_table_of_the_target():
    with pytest.raises(BenchError, match=r"target t: management: .* \(\[targets\.t\.headers\] in targets\.toml\)"):
        targets.parse("t=http://h", Path("none.toml"), {"api": "torchserve", "management": "http://h:8081?key=1"})


@pytest.mark.parametrize("status", [400, 401, 403])
def test_a_port_that_wants_a_key_is_not_said_to_be_absent(status, monkeypatch):
    refuses = [(0, http_response(status, b'{"code": 400, "type": "InvalidKeyException", "message": "Token Auth"}'))]
    with Scripted(refuses) as port, Scripted(serve("torchserve")) as server:
        row = DIALECTS["torchserve"]
        beside = row._replace(site=row.site._replace(managed=row.site.managed._replace(port=port.port)))
        monkeypatch.setattr(Target, "dialect", beside)
        notes: list[str] = []
        target = Target("t", server.url.removesuffix("/v1"), api="torchserve")
        assert probe_management.ask(target, lambda text: None, 5.0, Timeouts(), notes) == probe_management.Managed()
        assert notes == [
            f"the management API at http://127.0.0.1:{port.port} wants a key (HTTP {status}): the model's version and "
            "workers are not known; declare it by `management` and `management_key_env`, the key's variable, in the "
            "target's table of targets.toml"
        ]
        for name in ("KEY", "ADMIN"):
            monkeypatch.setenv(name, f"secret-{name}")
        declared = {"management": f"http://127.0.0.1:{port.port}"}
        for facts, said in (
            ({}, "it wants a key; name its variable by `management_key_env`"),
            ({"key_env": "KEY"}, "the target's key was refused: where this API has its own, name its variable by"),
            ({"management_key_env": "ADMIN"}, "the key in the variable ADMIN was refused"),
        ):
            wrong = Target("t", target.url, api="torchserve", **declared, **facts)
            with pytest.raises(TargetError, match=f"its management API at http.*: HTTP {status}; {said}") as caught:
                probe_management.ask(wrong, lambda text: None, 5.0, Timeouts(), [])
            assert "secret" not in str(caught.value)


def test_a_management_api_may_have_a_key_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("KEY", "requests-1234")
    monkeypatch.setenv("ADMIN", "admins-1234")
    right = ("authorization", "Bearer requests-1234")
    with Scripted(serve("torchserve", key=right)) as server, Scripted(manager([page("READY")])) as port:
        file = tmp_path / "targets.toml"
        file.write_text(
            f'[targets.t]\nurl = "{server.url.removesuffix("/v1")}"\napi = "torchserve"\nkey_env = "KEY"\n'
            f'management = "{port.url.removesuffix("/v1")}"\nmanagement_key_env = "ADMIN"\n'
        )
        (target,) = targets.parse("t", file, {})
        assert probe.probe(target, lambda text: None, 5.0).workers
        assert {seen.headers["authorization"] for seen in port.requests} == {"Bearer admins-1234"}
    assert targets.hider(target)("x admins-1234 y") == "x [key] y"


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"management_key_env": "ADMIN"}, "`management_key_env` without `management`"),
        ({"management_key_env": "sk-1 2", "management": "http://h:1"}, "management_key_env is the NAME of an env"),
        ({"management_key_env": "NOT_SET_HERE", "management": "http://h:1"}, r"\$NOT_SET_HERE, which management_key"),
    ],
)
def test_a_key_of_management_is_checked_as_any(facts, said, tmp_path):
    with pytest.raises(BenchError, match=said):
        targets.parse("t=http://h", tmp_path / "none.toml", {"api": "torchserve", **facts})

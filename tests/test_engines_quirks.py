"""What real servers were seen to do, each on a scripted one, so that it is held to in any clone (docs/engines.md)."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from llm_bench import probe
from llm_bench.dialects import DIALECTS
from llm_bench.errors import TargetError
from llm_bench.targets import Target
from tests.fixtures.protocols import body_of
from tests.scripted import Script, Scripted, Seen

# MLServer 1.7.1: Triton's list of models, and FastAPI's refusal of a body that has no `inputs`.
INDEX = [{"name": "words", "version": "1", "state": "READY", "reason": ""}]
REFUSED = {"detail": [{"type": "missing", "loc": ["body", "inputs"], "msg": "Field required"}]}
# Over REST it reads the tensors that follow the JSON as more of it.
BINARY = {"detail": [{"type": "json_invalid", "loc": ["body", 243], "msg": "JSON decode error"}]}
METADATA = {"name": "words", "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1]}], "outputs": []}


def mlserver(refusal: dict[str, Any]) -> Callable[[int, Seen], Script]:
    def answer(_: int, seen: Seen) -> Script:
        if seen.path == "/v2/repository/index":
            return body_of(INDEX)
        if seen.path == "/v2":
            return body_of({"name": "mlserver", "version": "1.7.1", "extensions": []})
        if seen.path == "/v2/models/words":
            return body_of(METADATA)
        return body_of(refusal, 422)

    return answer


@pytest.mark.parametrize(("api", "refusal"), [("triton-generate", REFUSED), ("kserve-binary", BINARY)])
def test_mlserver_looks_like_triton_until_it_is_asked_and_its_refusal_is_said(
    api: str, refusal: dict[str, Any]
) -> None:
    with Scripted(mlserver(refusal)) as server:
        root = server.url.removesuffix("/v1")
        with pytest.raises(TargetError) as raised:
            probe.probe(Target("t", root, api=api, model="words"), lambda text: None, 5.0)
    said = str(raised.value)
    assert said.startswith("target t: a small probe request failed (http_4xx: ")
    assert refusal["detail"][0]["msg"] in said
    assert "\n" not in said


def test_vllms_last_event_holds_its_own_account_beside_the_usage() -> None:
    metrics = {"time_to_first_token_ms": 115.6, "generation_time_ms": 613.6, "queue_time_ms": 0.06, "mean_itl_ms": 87.7}
    event = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 8}, "metrics": metrics}
    chunk = DIALECTS["openai-completions"].decode(json.dumps(event).encode())
    assert chunk.usage and chunk.usage.completion_tokens == 8
    assert (chunk.server_ms["server_tpot_ms"], chunk.server_ms["server_decode_ms"]) == (87.7, 613.6)

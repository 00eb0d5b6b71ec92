"""DIALECTS: how each protocol of the field says the same things: encode(Request) -> body, decode(event) -> Chunk.

No I/O and no clock. A new protocol is a row in one of the families' files; a new family adds its ROWS below.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from llm_bench import (
    dialect_anthropic,
    dialect_chunks,
    dialect_http,
    dialect_kserve,
    dialect_kserve_grpc,
    dialect_llamacpp,
    dialect_openai,
    dialect_pooling,
    dialect_responses,
    dialect_sglang,
    dialect_tgi,
    dialect_triton,
)
from llm_bench.bodies import Ask
from llm_bench.protocol import Chunk, Delta, Dialect, Usage
from llm_bench.request import Request

__all__ = ["DIALECTS", "Ask", "Chunk", "Delta", "Dialect", "Usage", "spoken", "unsayable"]

# name -> how it is spoken
DIALECTS: dict[str, Dialect] = {
    **dialect_openai.ROWS,
    **dialect_responses.ROWS,
    **dialect_tgi.ROWS,
    **dialect_triton.ROWS,
    **dialect_sglang.ROWS,
    **dialect_llamacpp.ROWS,
    **dialect_anthropic.ROWS,
    **dialect_chunks.ROWS,
    **dialect_pooling.ROWS,
    **dialect_kserve.ROWS,
    **dialect_kserve_grpc.ROWS,
    **dialect_http.ROWS,
}


def spoken(api: str, table: Mapping[str, Any]) -> Dialect:
    """A row of DIALECTS, or what a target's own table makes of it: `check` of the row's file has passed it."""
    return _spoken(api, tuple(table.items()))


@cache
def _spoken(api: str, table: tuple[tuple[str, Any], ...]) -> Dialect:
    row = DIALECTS[api]
    return row.made(dict(table)) if row.made and table else row


# Keys that hold the prompt in a captured body of any protocol; no row speaks the last one.
_PROMPT_KEYS = (*filter(None, dict.fromkeys(row.takes.prompt for row in DIALECTS.values())), "contents")


def unsayable(request: Request, api: str, keep_model: bool = False) -> str:
    """Why a protocol cannot say what the request brings, in words; "" where it can. `api` is a row of DIALECTS."""
    takes = DIALECTS[api].takes
    own = (request.body or {}).get("model") or request.model
    if keep_model and own and takes.model != "body":
        how = "is part of the URL" if takes.model == "path" else "cannot be named"
        return f"it names the model {own!r}, and the model of {api} {how}: leave --keep-model out"
    if request.body is not None and not takes.prompt:
        return f"{api} has bodies by its target's template, and takes no captured one"
    if request.body is not None:
        right = takes.prompt
        found = [key for key in _PROMPT_KEYS if request.body.get(key) is not None]
        kinds = (list,) if right == "messages" else (str, list)
        if found == [right] and isinstance(request.body[right], kinds) and request.body[right]:
            return ""
        elsewhere = " or ".join(filter(None, (_speaks(key) for key in found if key != right)))
        hint = f"; send it to an {elsewhere} target" if elsewhere else ""
        return f"its body has {' and '.join(found) or 'no prompt'}, {api} needs {right}, alone and not empty{hint}"
    if request.prompt_token_ids is not None and not takes.token_ids:
        what = "a chat needs messages or a prompt" if takes.chat else f"{api} takes a prompt as text"
        return f"{what}; token ids go to {' or '.join(TOKEN_ID_ROWS)}"
    if request.messages is not None and not takes.chat:
        who = "completions take" if api.endswith("completions") else f"{api} takes"
        return f"{who} a prompt; messages go to openai-chat"
    return ""


TOKEN_ID_ROWS = tuple(name for name, row in DIALECTS.items() if row.takes.token_ids)


def _speaks(key: str) -> str:
    """The first row whose bodies hold their prompt under `key`."""
    return next((name for name, row in DIALECTS.items() if row.takes.prompt == key), "")

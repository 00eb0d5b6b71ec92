"""A target is asked how likely it finds the bundled text: OpenAI's echo without an answer, which vLLM has too.

Read from answers of reference_engine and of vLLM 0.32; of SGLang and others untried.
"""

from typing import Any

import httpx
import orjson

from llm_bench import perplexity, talk, targets
from llm_bench.exchange import Timeouts
from llm_bench.perplexity import Scored
from llm_bench.printable import clean
from llm_bench.protocol import error_in, json_of
from llm_bench.targets import Target

LIMITS = Timeouts(ttft_s=60.0)  # one pass over a few hundred tokens
MOST_SHOWN = 200  # characters of a server's own words
CAN = "openai-"  # protocols below whose URL there is /completions too


def ask(target: Target, model: str) -> Scored | str:
    """What the target says of the bundled text, or in a sentence why it says nothing. Of several URLs the first."""
    if not target.api.startswith(CAN):
        return f"the protocol {target.api} has no way to ask for it"
    ours: dict[str, Any] = {"model": model, "prompt": perplexity.TEXT, "echo": True, "max_tokens": 0, "logprobs": 1}
    body = orjson.dumps({**target.extra, **ours, "stream": False, "n": 1})
    try:
        with talk.client_of(target, LIMITS) as client:
            response = client.post(target.urls[0] + "/completions", content=body)
        if response.status_code != 200:
            raise ValueError(f"HTTP {response.status_code}{_why(response.content)}")
        return perplexity.read(json_of(response.content), perplexity.TEXT)
    except (httpx.HTTPError, ValueError) as error:
        return clean(targets.hider(target)(str(error) or type(error).__name__))


def _why(body: bytes) -> str:
    found = json_of(body)
    said = error_in(found)[0] if isinstance(found, dict) else ""
    return f": {said[:MOST_SHOWN]}" if said else ""

"""The model in an own app of Ray Serve: each token a chunk of a StreamingResponse.

python ray_app.py PORT FOLDER SOCKETS      serves until SIGTERM
"""

import sys
import threading
from pathlib import Path

import lm
import ray
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from ray import serve

api = FastAPI()


@serve.deployment(max_ongoing_requests=16, max_queued_requests=64, ray_actor_options={"num_cpus": 1})
@serve.ingress(api)
class Words:
    def __init__(self, weights: str) -> None:
        self.lm = lm.Model(weights)

    @api.post("/")
    async def answer(self, request: Request):
        body = await request.json()
        texts = self.lm.answer(body["prompt"], int(body.get("max_tokens", 16)))
        try:
            first = next(texts)
        except lm.RefusedError as e:
            return JSONResponse({"detail": str(e)}, 400)
        if not body.get("stream", True):
            said = [first, *texts]
            return {"text": "".join(said), "tokens": len(said)}

        def chunks():
            yield first
            yield from texts

        return StreamingResponse(chunks(), media_type="text/plain")


def main() -> None:
    port, folder = int(sys.argv[1]), Path(sys.argv[2])
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        _temp_dir=sys.argv[3],
        runtime_env={"env_vars": {"PYTHONPATH": str(folder)}},
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(Words.bind(str(folder / "weights.npz")), name="words", route_prefix="/", blocking=False)
    threading.Event().wait()


if __name__ == "__main__":
    main()

"""The model in TorchServe: each token a chunk, by send_intermediate_predict_response."""

import json
from pathlib import Path

import lm
from ts.handler_utils.utils import send_intermediate_predict_response
from ts.torch_handler.base_handler import BaseHandler

SAID = "Intermediate Prediction success"


class Words(BaseHandler):
    def initialize(self, context):
        self.lm = lm.Model(str(Path(context.system_properties["model_dir"]) / "weights.npz"))
        self.initialized = True

    def handle(self, data, context):
        """A batch of one request."""
        body = data[0].get("body") or data[0].get("data")
        body = json.loads(body) if isinstance(body, bytes | bytearray) else body
        texts = self.lm.answer(body["prompt"], int(body.get("max_tokens", 16)))
        if not body.get("stream", True):
            said = list(texts)
            return [json.dumps({"text": "".join(said), "tokens": len(said)})]
        last = next(texts)
        for text in texts:
            send_intermediate_predict_response([last], context.request_ids, SAID, 200, context)
            last = text
        return [last]

"""The model in MLServer: whole by `infer`, streamed by `infer_stream` and `generate_stream`."""

import json
from pathlib import Path

import lm
from mlserver import MLModel
from mlserver.codecs import StringCodec
from mlserver.types import InferenceResponse

ANSWER = 16  # tokens, where nothing says how many


class Words(MLModel):
    async def load(self):
        self.lm = lm.Model(str(Path(__file__).parent / "weights.npz"))
        return True

    def asked(self, request):
        """(prompt, tokens): of the tensors that Triton's vLLM backend has; a client may fill both with the prompt."""
        texts = {tensor.name: StringCodec.decode_input(tensor)[0] for tensor in request.inputs}
        try:
            told = json.loads(texts.get("sampling_parameters", ""))
        except ValueError:
            told = {}
        return texts["text_input"], int(told.get("max_tokens", ANSWER))

    def response(self, text):
        return InferenceResponse(model_name=self.name, outputs=[StringCodec.encode_output("text_output", [text])])

    async def predict(self, payload):
        return self.response("".join(self.lm.answer(*self.asked(payload))))

    async def predict_stream(self, payloads):
        async for payload in payloads:
            for text in self.lm.answer(*self.asked(payload)):
                yield self.response(text)

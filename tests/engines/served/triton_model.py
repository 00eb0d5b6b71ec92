"""The model in Triton's Python backend, decoupled, with the names that Triton's vLLM backend gives its tensors."""

import json
import sys
import threading
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *json.loads((HERE / "paths.json").read_text())]  # the backend's stub ignores PYTHONPATH

import lm  # noqa: E402
import numpy as np  # noqa: E402
import triton_python_backend_utils as pb  # noqa: E402

FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
COUNTS = ("finish_reason", "num_input_tokens", "num_output_tokens")


def value(request, name, default):
    tensor = pb.get_input_tensor_by_name(request, name)
    if tensor is None:
        return default
    first = tensor.as_numpy().reshape(-1)[0]
    return first.decode() if isinstance(first, bytes) else first.item()


def text(name, what):
    return pb.Tensor(name, np.array([what.encode()], dtype=np.object_))


def count(name, n):
    return pb.Tensor(name, np.array([n], dtype=np.uint32))


class TritonPythonModel:
    def initialize(self, args):
        self.lm = lm.Model(str(HERE / "weights.npz"))

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request, request.get_response_sender()), daemon=True).start()

    def answer(self, request, sender):
        try:
            for response in self.responses(request):
                sender.send(pb.InferenceResponse(output_tensors=response))
            sender.send(flags=FINAL)
        except Exception as e:  # noqa: BLE001
            sender.send(pb.InferenceResponse(error=pb.TritonError(str(e))), flags=FINAL)

    def responses(self, request):
        prompt, stream = value(request, "text_input", ""), value(request, "stream", False)
        tokens = int(json.loads(value(request, "sampling_parameters", "{}")).get("max_tokens", 16))
        wants = {name: value(request, f"return_{name}", False) for name in COUNTS}

        def response(said, n, reason):
            told = [text("text_output", said)]
            told += [text("finish_reason", reason)] if wants["finish_reason"] else []
            told += [count("num_input_tokens", len(self.lm.ids(prompt)))] if wants["num_input_tokens"] else []
            return told + ([count("num_output_tokens", n)] if wants["num_output_tokens"] else [])

        said = []
        for i, piece in enumerate(self.lm.answer(prompt, tokens)):
            if request.is_cancelled():
                return
            said.append(piece)
            if stream:
                yield response(piece, 1, "length" if i == tokens - 1 else "None")
        if not stream:
            yield response("".join(said), tokens, "length")

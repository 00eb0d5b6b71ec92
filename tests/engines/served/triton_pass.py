"""A model of one pass in Triton's Python backend, batched by the server: numbers doubled, a text in capitals."""

import json
import sys
from pathlib import Path

sys.path[:0] = json.loads((Path(__file__).parent / "paths.json").read_text())

import numpy as np  # noqa: E402
import triton_python_backend_utils as pb  # noqa: E402


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        numbers = pb.get_input_tensor_by_name(request, "numbers").as_numpy()
        texts = pb.get_input_tensor_by_name(request, "text").as_numpy()
        upper = np.array([[one.decode().upper().encode() for one in row] for row in texts], dtype=np.object_)
        return pb.InferenceResponse([pb.Tensor("twice", numbers * 2), pb.Tensor("upper", upper)])

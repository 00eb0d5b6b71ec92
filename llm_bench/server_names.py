"""METRICS_OF: what serving engines call their metrics, under one canonical name; data alone."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from llm_bench import prometheus

Kind = Literal["counter", "gauge", "histogram"]


class Metric(NamedTuple):
    kind: Kind
    unit: str  # of the figure; a histogram's is of its mean
    meaning: str
    names: Mapping[str, Sequence[str]]  # server -> names on the wire, newest first; braces pick samples by label
    over: Literal["sum", "mean"] = "sum"  # of a gauge's samples: several engines' requests add up, shares do not


# SGLang, TGI, TensorRT-LLM, its Triton backend and Ray Serve LLM by their documents and sources; the others as seen.
# Triton's own durations are left out: of a decoupled model, as LLMs are, they cover only the call that starts it.
METRICS_OF: dict[str, Metric] = {
    "queue_time": Metric("histogram", "ms", "arrival to scheduled", {
        "vLLM": ("vllm:request_queue_time_seconds",),
        "SGLang": ("sglang:queue_time_seconds",),
        "TGI": ("tgi_request_queue_duration",),
        "TensorRT-LLM": ("trtllm_request_queue_time_seconds",),
        "Ray Serve LLM": ("ray_vllm_request_queue_time_seconds", "ray_vllm:request_queue_time_seconds"),
    }),
    "prefill_time": Metric("histogram", "ms", "scheduled to first token", {
        "vLLM": ("vllm:request_prefill_time_seconds",),
        "TensorRT-LLM": ("trtllm_request_prefill_time_seconds",),
        "Ray Serve LLM": ("ray_vllm_request_prefill_time_seconds", "ray_vllm:request_prefill_time_seconds"),
    }),
    "decode_time": Metric("histogram", "ms", "first token to end", {
        "vLLM": ("vllm:request_decode_time_seconds",),
        "TensorRT-LLM": ("trtllm_request_decode_time_seconds",),
        "Ray Serve LLM": ("ray_vllm_request_decode_time_seconds", "ray_vllm:request_decode_time_seconds"),
    }),
    "inference_time": Metric("histogram", "ms", "scheduled to end", {
        "vLLM": ("vllm:request_inference_time_seconds",),
        "TGI": ("tgi_request_inference_duration",),
        "TensorRT-LLM": ("trtllm_request_inference_time_seconds",),
    }),
    "server_e2e": Metric("histogram", "ms", "arrival to end", {
        "vLLM": ("vllm:e2e_request_latency_seconds",),
        "SGLang": ("sglang:e2e_request_latency_seconds",),
        "TGI": ("tgi_request_duration",),
        "TensorRT-LLM": ("trtllm_e2e_request_latency_seconds",),
        "Ray Serve LLM": ("ray_vllm_e2e_request_latency_seconds", "ray_vllm:e2e_request_latency_seconds"),
    }),
    "server_ttft": Metric("histogram", "ms", "arrival to first token", {
        "vLLM": ("vllm:time_to_first_token_seconds",),
        "SGLang": ("sglang:time_to_first_token_seconds",),
        "TensorRT-LLM": ("trtllm_time_to_first_token_seconds",),
        "Ray Serve LLM": ("ray_vllm_time_to_first_token_seconds", "ray_vllm:time_to_first_token_seconds"),
    }),
    "server_itl": Metric("histogram", "ms", "gap between tokens", {
        "vLLM": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        "SGLang": ("sglang:inter_token_latency_seconds",),
        "TGI": ("tgi_request_mean_time_per_token_duration",),
        "TensorRT-LLM": ("trtllm_time_per_output_token_seconds",),
        "Ray Serve LLM": ("ray_vllm_inter_token_latency_seconds", "ray_vllm:inter_token_latency_seconds"),
    }),
    "step_tokens": Metric("histogram", "tokens", "tokens of an engine's step", {
        "vLLM": ("vllm:iteration_tokens_total",),
    }),
    "running": Metric("gauge", "1", "requests in the batch", {
        "vLLM": ("vllm:num_requests_running",),
        "SGLang": ("sglang:num_running_reqs",),
        "TGI": ("tgi_batch_current_size",),
        "TensorRT-LLM": ("trtllm_num_requests_running", "json:numActiveRequests"),
        "Triton": ('nv_trt_llm_request_metrics{request_type="active"}',),
        "llama.cpp": ("llamacpp:requests_processing",),
        "Ray Serve LLM": ("ray_vllm_num_requests_running", "ray_vllm:num_requests_running"),
    }),
    "waiting": Metric("gauge", "1", "requests in the queue", {
        "vLLM": ("vllm:num_requests_waiting",),
        "SGLang": ("sglang:num_queue_reqs",),
        "TGI": ("tgi_queue_size",),
        "TensorRT-LLM": ("trtllm_num_requests_waiting", "json:numQueuedRequests"),
        "Triton": ('nv_trt_llm_request_metrics{request_type="waiting"}', "nv_inference_pending_request_count"),
        "llama.cpp": ("llamacpp:requests_deferred",),
        "Ray Serve LLM": ("ray_vllm_num_requests_waiting", "ray_vllm:num_requests_waiting"),
    }),
    "kv_usage": Metric("gauge", "share", "KV memory in use", {
        "vLLM": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        "SGLang": ("sglang:token_usage",),
        "TensorRT-LLM": ("trtllm_kv_cache_utilization", "json:kvCacheUsage"),
        "Triton": ('nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction"}',),
        "llama.cpp": ("llamacpp:kv_cache_usage_ratio",),
        "Ray Serve LLM": ("ray_vllm_kv_cache_usage_perc", "ray_vllm:kv_cache_usage_perc"),
    }, over="mean"),
    "kv_pool": Metric("gauge", "tokens", "tokens that the KV memory holds when full", {
        "vLLM": ("cache:pool_tokens",),
        "SGLang": ("sglang:max_total_num_tokens",),
    }),
    "kv_block": Metric("gauge", "tokens", "tokens of a block of KV memory", {
        "vLLM": ("cache:block_tokens",),
    }, over="mean"),
    "preemptions": Metric("counter", "1", "requests put off for lack of KV memory", {
        "vLLM": ("vllm:num_preemptions_total",),
        "SGLang": ("sglang:num_retracted_requests_total", "sglang:num_retracted_reqs_total"),
        "Ray Serve LLM": ("ray_vllm_num_preemptions_total", "ray_vllm:num_preemptions_total"),
    }),
    "cache_hits": Metric("counter", "tokens", "prompt tokens found in the prefix cache", {
        "vLLM": ("vllm:prefix_cache_hits_total",),
        "SGLang": ("sglang:cached_tokens_total",),
        "llama.cpp": ("llamacpp:prompt_tokens_cached_total",),
        "TensorRT-LLM": ("trtllm_prompt_cached_tokens_total",),
        "Ray Serve LLM": ("ray_vllm_prefix_cache_hits_total", "ray_vllm:prefix_cache_hits_total"),
    }),
    "cache_queries": Metric("counter", "tokens", "prompt tokens looked up in the prefix cache", {
        "vLLM": ("vllm:prefix_cache_queries_total",),
        "SGLang": ("sglang:prompt_tokens_total",),
        "TensorRT-LLM": ("trtllm_prompt_tokens_total",),
        "Ray Serve LLM": ("ray_vllm_prefix_cache_queries_total", "ray_vllm:prefix_cache_queries_total"),
    }),
    "prompt_tokens": Metric("counter", "tokens", "prompt tokens; llama.cpp: without those from its cache", {
        "vLLM": ("vllm:prompt_tokens_total",),
        "SGLang": ("sglang:prompt_tokens_total",),
        "TGI": ("tgi_request_input_length_sum",),
        "TensorRT-LLM": ("trtllm_prompt_tokens_total",),
        "llama.cpp": ("llamacpp:prompt_tokens_total",),
        "Ray Serve LLM": ("ray_vllm_prompt_tokens_total", "ray_vllm:prompt_tokens_total"),
    }),
    "generated_tokens": Metric("counter", "tokens", "tokens made; TGI: of requests that have ended", {
        "vLLM": ("vllm:generation_tokens_total",),
        "SGLang": ("sglang:generation_tokens_total",),
        "TGI": ("tgi_request_generated_tokens_sum",),
        "TensorRT-LLM": ("trtllm_generation_tokens_total",),
        "llama.cpp": ("llamacpp:tokens_predicted_total",),
        "Ray Serve LLM": ("ray_vllm_generation_tokens_total", "ray_vllm:generation_tokens_total"),
    }),
    "requests_ended": Metric("counter", "1", "requests ended without an error", {
        "vLLM": ("vllm:request_success_total",),
        "SGLang": ("sglang:num_requests_total",),
        "TGI": ("tgi_request_success",),
        "TensorRT-LLM": ("trtllm_request_success_total",),
        "Triton": ("nv_inference_request_success",),
        "MLServer": ("model_infer_request_success_total",),
        "Ray Serve LLM": ("ray_vllm_request_success_total", "ray_vllm:request_success_total"),
    }),
    "inferences": Metric("counter", "1", "inputs that models computed", {"Triton": ("nv_inference_count",)}),
    "executions": Metric("counter", "1", "batches in which they did; of a decoupled model, the calls that start it", {
        "Triton": ("nv_inference_exec_count",),
    }),
    "steps": Metric("counter", "1", "steps of the engine", {
        "reference engine": ("reference_engine:steps_total",),
        "llama.cpp": ("llamacpp:n_decode_total",),
    }),
    "gpu_busy": Metric("gauge", "share", "time in which a kernel ran, by NVML", {
        "Triton": ("nv_gpu_utilization",),
        "this machine": ("nvml:busy",),
    }, over="mean"),
    "gpu_memory_busy": Metric("gauge", "share", "time in which the GPU's memory was read or written, by NVML", {
        "this machine": ("nvml:memory_busy",),
    }, over="mean"),
    "gpu_memory": Metric("gauge", "share", "GPU memory in use, by NVML", {
        "this machine": ("nvml:memory_used",),
    }, over="mean"),
    "gpu_energy": Metric("counter", "J", "energy of the GPUs, by NVML", {"this machine": ("nvml:energy_j",)}),
    "gpu_power": Metric("gauge", "W", "power of the GPUs, by NVML", {"this machine": ("nvml:power_w",)}),
    "server_cpu": Metric("counter", "s", "CPU time of the server's processes on this machine", {
        "this machine": ("host:server_cpu_s",),
    }),
    "server_memory": Metric("gauge", "bytes", "resident memory of the server's processes on this machine", {
        "this machine": ("host:server_rss_bytes",),
    }),
    "host_busy": Metric("counter", "s", "CPU time of everything on this machine", {"this machine": ("host:cpu_s",)}),
}  # fmt: skip

# A sample of these says in its labels how large the KV memory is; `read` makes cache:* of them, that have values.
CONFIGS = ("vllm:cache_config_info", "ray_vllm_cache_config_info", "ray_vllm:cache_config_info")

_PARTS = {"histogram": ("_sum", "_count", "_bucket"), "counter": ("",), "gauge": ("",)}
WANTED = frozenset(
    prometheus.split(name)[0] + part
    for metric in METRICS_OF.values()
    for names in metric.names.values()
    for name in names
    for part in _PARTS[metric.kind]
) | {*CONFIGS}

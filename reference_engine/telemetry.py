"""What the engine knows about itself, as Prometheus text; names are vLLM's where the meaning is the same.

A request's queue, prefill and decode times add up to its end-to-end time: queue ends when it is *first* scheduled, and
time lost to preemption stays inside prefill or decode (vLLM lets the queue end at the latest scheduling instead).
`account` has the finer parts of one request.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from reference_engine.scheduler import Output, Scheduler
from reference_engine.sequence import Sequence

# Bounds in seconds. vLLM's, with finer ones below: a simulated step may take 1 ms.
TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
          160.0, 640.0, 2560.0)  # fmt: skip
ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
         20.0, 40.0, 80.0)  # fmt: skip
REQUEST_S = (0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
             120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip

HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("Arrival to first token.", TTFT_S),
    "vllm:inter_token_latency_seconds": ("Gap between two tokens of a sequence.", ITL_S),
    "vllm:e2e_request_latency_seconds": ("Arrival to end, of requests that were not aborted.", REQUEST_S),
    "vllm:request_queue_time_seconds": ("Arrival to first scheduled.", REQUEST_S),
    "vllm:request_prefill_time_seconds": ("First scheduled to first token.", REQUEST_S),
    "vllm:request_decode_time_seconds": ("First token to end.", REQUEST_S),
}
FINISHED = ("stop", "length", "abort", "timeout", "oom", "nonfinite", "error")
REFUSED = ("queue_full", "draining", "bodies")


class Buckets:
    """A histogram as plain counts: one bisect an observation, because there is one a token."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def rows(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, as Prometheus has them."""
        total, rows = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            rows.append((bound, float(total)))
        return rows


class Telemetry:
    """The engine's thread observes, the event loop reads; an int or float is read whole, so there is no lock."""

    def __init__(self, scheduler: Scheduler, model_name: str) -> None:
        self.scheduler = scheduler
        self.labels = {"engine": "0", "model_name": model_name}
        self.histograms = {name: Buckets(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self.finished: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.failed_allocations = 0
        self.restarts = 0  # of the step loop, after a fault
        self.ttft = self.histograms["vllm:time_to_first_token_seconds"]
        self.itl = self.histograms["vllm:inter_token_latency_seconds"]
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def observe(self, outputs: list[Output]) -> None:
        """One step's outputs."""
        for output in outputs:
            sequence = output.sequence
            if sequence.output_len == 1:
                self.ttft.observe((sequence.first_token_ns - sequence.arrived_ns) / 1e9)
            else:
                self.itl.observe(output.gap_ns / 1e9)
            if output.finish_reason:
                self.observe_end(sequence)

    def observe_end(self, sequence: Sequence) -> None:
        """A sequence that has ended, by itself or by its client."""
        self.finished[sequence.finish_reason] += 1
        if sequence.finish_reason not in ("stop", "length"):
            return
        stamps = (sequence.arrived_ns, sequence.scheduled_ns, sequence.first_token_ns, sequence.finished_ns)
        for part, begin, end in (("e2e_request_latency", 0, 3), ("request_queue_time", 0, 1),
                                 ("request_prefill_time", 1, 2), ("request_decode_time", 2, 3)):  # fmt: skip
            self.histograms[f"vllm:{part}_seconds"].observe((stamps[end] - stamps[begin]) / 1e9)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """What prometheus-client asks of a collector."""
        names, values = list(self.labels), list(self.labels.values())
        scheduler, counts, blocks = self.scheduler, self.scheduler.counts, self.scheduler.blocks
        for name, text, level in (
            ("vllm:num_requests_running", "Sequences that hold blocks.", len(scheduler.running)),
            ("vllm:num_requests_waiting", "Sequences that wait for a seat or for blocks.", scheduler.queued),
            (
                "vllm:kv_cache_usage_perc",
                "Share of KV blocks held, 1 is all.",
                1 - len(blocks.free) / blocks.num_blocks,
            ),
        ):
            gauge = GaugeMetricFamily(name, text, labels=names)
            gauge.add_metric(values, level)
            yield gauge
        for name, text, total in (
            ("vllm:num_preemptions", "Preemptions.", counts.preemptions),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", counts.prefix_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", counts.prefix_hits),
            ("vllm:prompt_tokens", "Prompt tokens of sequences that have a first token.", counts.prompt_tokens),
            ("vllm:generation_tokens", "Tokens sampled.", counts.generation_tokens),
            ("reference_engine:swapped_out_blocks", "Blocks copied to host memory.", counts.swapped_out),
            ("reference_engine:swapped_in_blocks", "Blocks copied back.", counts.swapped_in),
            ("reference_engine:restarts", "Restarts of the step loop after a fault.", self.restarts),
            ("reference_engine:steps", "Steps of the engine.", counts.steps),
            (
                "reference_engine:failed_allocations",
                "Calls of the runner that memory did not hold.",
                self.failed_allocations,
            ),
        ):
            counter = CounterMetricFamily(name, text, labels=names)
            counter.add_metric(values, total)
            yield counter
        ended = CounterMetricFamily("vllm:request_success", "Sequences ended.", labels=["finished_reason", *names])
        for reason in FINISHED:
            ended.add_metric([reason, *values], self.finished[reason])
        yield ended
        refused = CounterMetricFamily("reference_engine:refused", "Requests refused.", labels=["reason", *names])
        for reason in REFUSED:
            refused.add_metric([reason, *values], self.refused[reason])
        yield refused
        for name, (text, _) in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(name, text, labels=names)
            histogram.add_metric(values, self.histograms[name].rows(), self.histograms[name].sum)
            yield histogram
        info = {"block_size": str(blocks.block_size), "num_gpu_blocks": str(blocks.num_blocks)}
        config = GaugeMetricFamily("vllm:cache_config_info", "KV pool.", labels=[*info, *names])
        config.add_metric([*info.values(), *values], 1)
        yield config

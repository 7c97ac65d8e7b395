"""What /metrics tells, with vLLM's names and meanings, so that dashboards made for it work.

All counts are plain numbers of one thread, the server's loop; Prometheus' own types, which lock, are made of them when
somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from eet_lab.serving.jobs import Answer, Load
from eet_lab.serving.response_cache import ResponseCache

FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
BETWEEN_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
WHOLE_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Histogram:
    """How many values were at most as large as each bound."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, help: str, model: str) -> Metric:
        """The same for Prometheus."""
        total, buckets = 0, []
        for bound, count in zip([*(str(float(bound)) for bound in self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        found = HistogramMetricFamily(name, help, labels=["model_name"])
        found.add_metric([model], buckets, self._sum)
        return found


class Metrics:
    """Counts of one server. `load` tells what the engine has at hand."""

    def __init__(self, model: str, load: Callable[[], Load], cache: ResponseCache) -> None:
        self._model, self._load, self._cache = model, load, cache
        self.prompt_tokens = self.generation_tokens = 0
        self.finished = Counter[str]()
        self.refused = Counter[int]()
        self.first_token_s, self.between_s = Histogram(FIRST_TOKEN_S), Histogram(BETWEEN_S)
        self.whole_s, self._queue_s, self._prefill_s = Histogram(WHOLE_S), Histogram(WHOLE_S), Histogram(WHOLE_S)
        self._decode_s, self._inference_s = Histogram(WHOLE_S), Histogram(WHOLE_S)
        self.prompt_lengths, self.generation_lengths = Histogram(TOKENS), Histogram(TOKENS)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def observe_phases(self, answer: Answer) -> None:
        """Count how long a complete answer's engine took for each of its phases; nothing for one without a token."""
        phases, first_at, last_at = answer.phases, answer.first_at, answer.last_at
        if phases is None or first_at is None or last_at is None:
            return
        self._queue_s.observe(phases.queue_s)
        self._prefill_s.observe(phases.prefill_s)
        self._decode_s.observe(last_at - first_at)
        self._inference_s.observe(phases.prefill_s + last_at - first_at)

    def text(self) -> bytes:
        """What Prometheus reads."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Nothing: to be registered must not ask the engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics as they are now."""
        load = self._load()
        gauges = (
            ("num_requests_running", "Requests in execution.", load.running),
            ("num_requests_waiting", "Requests that wait for a slot.", load.waiting),
            ("kv_cache_usage_perc", "Share of the KV cache that holds tokens. 1 is all of it.", load.kv_usage),
            ("eet:response_cache_bytes", "Bytes of answers that are kept.", self._cache.num_bytes),
        )
        counters = (
            ("num_preemptions", "Requests that gave way and were read again.", load.preempted),
            ("prefix_cache_queries", "Prompt tokens that were looked up.", load.prefix_cache_queries),
            ("prefix_cache_hits", "Those of them that were in the prefix cache.", load.prefix_cache_hits),
            ("prompt_tokens", "Tokens of prompts.", self.prompt_tokens),
            ("generation_tokens", "Tokens that were generated.", self.generation_tokens),
            ("eet:response_cache_hits", "Requests answered from the response cache.", self._cache.hits),
            (
                "eet:response_cache_misses",
                "Cacheable requests that were not in the response cache.",
                self._cache.misses,
            ),
        )
        for kind, rows in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, help, value in rows:
                found = kind(name if ":" in name else f"vllm:{name}", help, labels=["model_name"])
                found.add_metric([self._model], value)
                yield found
        yield self._by("vllm:request_success", "Requests that ended, by reason.", "finished_reason", self.finished)
        yield self._by("eet:requests_refused", "Requests that were answered with an error.", "status", self.refused)
        for name, help, histogram in (
            ("time_to_first_token_seconds", "From acceptance to the first token.", self.first_token_s),
            ("inter_token_latency_seconds", "From one token to the next of a request.", self.between_s),
            ("e2e_request_latency_seconds", "From acceptance to the last token.", self.whole_s),
            ("request_queue_time_seconds", "From the engine's queue to a slot.", self._queue_s),
            ("request_prefill_time_seconds", "From a slot to the first token.", self._prefill_s),
            ("request_decode_time_seconds", "From the first token to the last one.", self._decode_s),
            ("request_inference_time_seconds", "From a slot to the last token.", self._inference_s),
            ("request_prompt_tokens", "Tokens of a prompt.", self.prompt_lengths),
            ("request_generation_tokens", "Tokens that were generated for a request.", self.generation_lengths),
        ):
            yield histogram.family(f"vllm:{name}", help, self._model)

    def _by(self, name: str, help: str, label: str, counts: Counter) -> Metric:
        found = CounterMetricFamily(name, help, labels=["model_name", label])
        for key, count in sorted(counts.items()):
            found.add_metric([self._model, str(key)], count)
        return found

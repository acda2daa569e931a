"""Renders the metrics of the front and the engine in Prometheus' text format.

Where vLLM has the same figure, the name is vLLM's with the prefix edgemoe_. All metrics have the label `model_name`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from edgemoe.types.json_object import Json
from edgemoe.types.request import Emission

disable_created_metrics()  # type: ignore[no-untyped-call]
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 180, 600)
TPOT_S = (0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
MODEL = "model_name"


class MetricFamilies:
    """Holds the metrics of all models of a front, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"edgemoe_{name}_seconds", help_text, [MODEL], buckets=buckets, registry=registry)

        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(f"edgemoe_{name}", help_text, [*labels, MODEL], registry=registry)

        self.requests = counter("http_requests", "HTTP requests", "path", "status")
        self.ttft = histogram("time_to_first_token", "From acceptance to a choice's first token", TTFT_S)
        self.tpot = histogram("request_time_per_output_token", "Mean of one choice, after its first token", TPOT_S)
        self.e2e = histogram("e2e_request_latency", "From acceptance to the end of a choice", TTFT_S)
        self.tokens = counter("generation_tokens", "Tokens delivered")
        self.refused_keys = counter("refused_keys", "Requests by TCP without a valid key")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens accepted")
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, MirroredCounter] = {}

    def gauge(self, name: str, help_text: str) -> Gauge:
        """Returns the family of gauges of that name."""
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, help_text, [MODEL], registry=self.registry)
        return self._gauges[name]

    def counter(self, name: str, help_text: str) -> MirroredCounter:
        """Returns the family of counters of that name."""
        if name not in self._counters:
            self._counters[name] = MirroredCounter(name, help_text)
            self.registry.register(self._counters[name])
        return self._counters[name]


class Metrics:
    """Holds one model's counters and histograms."""

    def __init__(
        self, model: str = "", now: Callable[[], float] = time.monotonic, families: MetricFamilies | None = None
    ) -> None:
        self.now = now
        self.model = model
        self._families = families = families or MetricFamilies()
        self.ttft, self.tpot, self.e2e = (each.labels(model) for each in (families.ttft, families.tpot, families.e2e))
        self.tokens, self.refused_keys = families.tokens.labels(model), families.refused_keys.labels(model)
        self.prompt_tokens = families.prompt_tokens.labels(model)

    def of(self, model: str) -> Metrics:
        """Returns the metrics of another model, which are rendered with these."""
        return Metrics(model, self.now, self._families)

    def answered(self, path: str, status: int) -> None:
        """Counts one HTTP request. `path` must be a route, so that clients cannot create labels."""
        self._families.requests.labels(path, str(status), self.model).inc()

    def gauge(self, name: str, help_text: str, value: Callable[[], float]) -> None:
        """Registers a gauge that shows `value()`."""
        self._families.gauge(name, help_text).labels(self.model).set_function(value)

    def counter(self, name: str, help_text: str, value: Callable[[], float]) -> None:
        """Registers a counter that shows `value()`, which must never decrease. `name` ends in _total."""
        self._families.counter(name, help_text).values[self.model] = value

    def figures(self) -> dict[str, float]:
        """Returns the front's own metrics by full name, without the model_name label."""
        samples = (sample for family in self._families.registry.collect() for sample in family.samples)
        own = (sample for sample in samples if sample.labels.get(MODEL) == self.model)
        return {_full_name(sample.name, sample.labels): sample.value for sample in own}

    def render(self, engines: Mapping[str, Mapping[str, float]]) -> bytes:
        """Returns the page for /metrics, with the metrics of engines by model."""
        return generate_latest(self._families.registry) + render_metrics(engines).encode()


def _full_name(name: str, labels: Mapping[str, str]) -> str:
    inside = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()) if key != MODEL)
    return f"{name}{{{inside}}}" if inside else name


class MirroredCounter(Collector):
    """Shows counters that are kept elsewhere."""

    def __init__(self, name: str, help_text: str) -> None:
        self._about = (name, help_text)
        self.values: dict[str, Callable[[], float]] = {}  # by model

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(*self._about, labels=[MODEL])
        for model, value in self.values.items():
            family.add_metric([model], value())
        yield family


class GenerationClock:
    """Times the choices of one generation from its acceptance."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = self._last = metrics.now()
        self._first: dict[str, float] = {}
        self._tokens: dict[str, int] = {}

    def emitted(self, emission: Emission, ended: bool) -> None:
        """Notes one emission of a choice, its last one if `ended`."""
        now, name, metrics = self._metrics.now(), emission.request, self._metrics
        if emission.token is not None:
            self._last = now
            self._tokens[name] = self._tokens.get(name, 0) + 1
            metrics.tokens.inc()
            if name not in self._first:
                self._first[name] = now
                metrics.ttft.observe(now - self._start)
        if ended:
            metrics.e2e.observe(now - self._start)
            if (tokens := self._tokens.get(name, 0)) > 1:
                metrics.tpot.observe((now - self._first[name]) / (tokens - 1))

    def timings(self, prompt_tokens: int, cached_tokens: int) -> Json:
        """Returns llama.cpp's `timings` over all choices.

        The prompt's time ends with the first token and includes waiting; the rest is the prediction's.
        """
        first = min(self._first.values(), default=self._last)
        prompt_ms, predicted_ms = 1e3 * (first - self._start), 1e3 * (self._last - first)
        prompt_n, predicted_n = prompt_tokens - cached_tokens, sum(self._tokens.values())
        return {
            "cache_n": cached_tokens,
            "prompt_n": prompt_n,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_ms / max(1, prompt_n),
            "prompt_per_second": 1e3 * prompt_n / max(prompt_ms, 1e-3),
            "predicted_n": predicted_n,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": predicted_ms / max(1, predicted_n),
            "predicted_per_second": 1e3 * predicted_n / max(predicted_ms, 1e-3),
        }


def render_metrics(engines: Mapping[str, Mapping[str, float]]) -> str:
    """Returns metrics of models by final name as lines of text, grouped by family. Families in _total are counters."""
    families: dict[str, list[str]] = {}
    rows = ((name, model, value) for model, metrics in engines.items() for name, value in metrics.items())
    for name, model, value in sorted(rows):
        escaped = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        family, _, inside = name.partition("{")
        labels = ",".join(filter(None, (inside.removesuffix("}"), f'{MODEL}="{escaped}"')))
        families.setdefault(family, []).append(f"{family}{{{labels}}} {value!r}")
    lines = []
    for family, samples in families.items():
        kind = "counter" if family.endswith("_total") else "gauge"
        lines += [f"# TYPE {family} {kind}", *samples]
    return "\n".join([*lines, ""])

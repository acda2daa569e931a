"""The front's own figures, and the engine's beside them, in Prometheus' text format."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from edgemoe.types import Emission

disable_created_metrics()  # type: ignore[no-untyped-call]
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 180, 600)
TPOT_S = (0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)


class Metrics:
    """Counts and histograms of one front. Each has its own registry, so that a process may hold several."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("edgemoe_requests", "HTTP requests", ["path", "status"], registry=registry)
        self.ttft = Histogram("edgemoe_ttft_seconds", "Time to first token", buckets=TTFT_S, registry=registry)
        self.tpot = Histogram(
            "edgemoe_tpot_seconds", "Time per output token after the first", buckets=TPOT_S, registry=registry
        )
        self.e2e = Histogram("edgemoe_request_seconds", "Time of one choice", buckets=TTFT_S, registry=registry)
        self.tokens = Counter("edgemoe_generated_tokens", "Tokens delivered", registry=registry)
        self.prompt_tokens = Counter("edgemoe_prompt_tokens", "Prompt tokens accepted", registry=registry)

    def answered(self, path: str, status: int) -> None:
        """Counts one HTTP request; `path` is a route, never what a client made up."""
        self._requests.labels(path, str(status)).inc()

    def gauge(self, name: str, help_text: str, value: Callable[[], float]) -> None:
        """Shows `value()` as `name` from now on."""
        Gauge(name, help_text, registry=self._registry).set_function(value)

    def render(self, engine: Mapping[str, float]) -> bytes:
        """The page for /metrics."""
        return generate_latest(self._registry) + render_values(engine).encode()


class Clock:
    """Times the choices of one job, from its acceptance."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = metrics.now()
        self._first: dict[str, float] = {}
        self._tokens: dict[str, int] = {}

    def emitted(self, emission: Emission, ended: bool) -> None:
        """Notes one emission of a choice, its last one if `ended`."""
        now, name, metrics = self._metrics.now(), emission.request, self._metrics
        if emission.token is not None:
            self._tokens[name] = self._tokens.get(name, 0) + 1
            metrics.tokens.inc()
            if name not in self._first:
                self._first[name] = now
                metrics.ttft.observe(now - self._start)
        if ended:
            metrics.e2e.observe(now - self._start)
            if (tokens := self._tokens.get(name, 0)) > 1:
                metrics.tpot.observe((now - self._first[name]) / (tokens - 1))


def render_values(values: Mapping[str, float]) -> str:
    """Final metric names (labels included) and numbers, grouped by family and typed by their suffix."""
    families: dict[str, list[str]] = {}
    for name, value in sorted(values.items()):
        families.setdefault(name.partition("{")[0], []).append(f"{name} {value!r}")
    lines = []
    for family, samples in families.items():
        kind = "counter" if family.endswith("_total") else "gauge"
        lines += [f"# TYPE {family} {kind}", *samples]
    return "\n".join([*lines, ""])

"""Metrics of the server in the format of Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .answer import Answer
from .models import Models

PREFIX = "executorch_mlx"
TIME_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
RATE_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
# Field of EngineStats -> whether its value only grows, and the help text of its metric.
ENGINE_FIELDS = {
    "running": (False, "requests that run, each in a row of the KV cache"),
    "waiting": (False, "requests in the queue"),
    "rows": (False, "rows of the KV cache: the requests that can run at once"),
    "requests": (True, "requests of the engine that ended; each choice counts as one"),
    "failed": (True, "requests of the engine that ended by an error"),
    "prompt_tokens": (True, "tokens of prompts"),
    "reused_tokens": (True, "tokens of prompts that were in the KV cache already"),
    "generated_tokens": (True, "tokens of answers"),
    "steps": (True, "calls of the program that drew tokens"),
    "drafted_tokens": (True, "tokens that speculation guessed"),
    "accepted_tokens": (True, "guessed tokens that were equal to the drawn tokens"),
    "busy_seconds": (True, "time in the model"),
}


class Metrics:
    """The metrics of one server."""

    def __init__(self, models: Models):
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(models))
        labels = {"labelnames": ("model",), "registry": self._registry}
        self._first_token = Histogram(
            f"{PREFIX}_time_to_first_token_seconds",
            "from the request to the first token",
            buckets=TIME_BUCKETS,
            **labels,
        )
        self._seconds = Histogram(
            f"{PREFIX}_answer_seconds", "from the request to the end of the answer", buckets=TIME_BUCKETS, **labels
        )
        self._queue = Histogram(f"{PREFIX}_queue_seconds", "time in the queue", buckets=TIME_BUCKETS, **labels)
        self._rate = Histogram(
            f"{PREFIX}_answer_tokens_per_second", "tokens after the first, per second", buckets=RATE_BUCKETS, **labels
        )

    def add(self, answer: Answer) -> None:
        """Count an answer that has ended."""
        name = answer.model.name
        self._seconds.labels(name).observe(time.monotonic() - answer.started)
        for choice in answer.choices:
            metrics = choice.metrics
            if choice.first_token_at is not None:
                self._first_token.labels(name).observe(choice.first_token_at - answer.started)
                self._queue.labels(name).observe(metrics.queue_seconds)
            if metrics.generation_tokens_per_second > 0:
                self._rate.labels(name).observe(metrics.generation_tokens_per_second)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _EngineCollector:
    """Reads the statistics of the engines each time the metrics are requested."""

    def __init__(self, models: Models):
        self._models = models

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        stats = {model.name: numbers for model, numbers in self._models.stats().items()}
        for field, (grows, text) in ENGINE_FIELDS.items():
            family = CounterMetricFamily if grows else GaugeMetricFamily
            metric = family(f"{PREFIX}_engine_{field}", text, labels=["model"])
            for name, values in stats.items():
                metric.add_metric([name], getattr(values, field))
            yield metric

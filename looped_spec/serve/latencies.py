"""What the front measures of each answer, as Prometheus metrics with vLLM's names."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from looped_spec.serve.job import Job, Update

_SHORT_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_LONG_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

ENGINE_LABEL = "0"
"""The label `engine` of a server with one engine; dashboards group by it."""


class Latencies:
    """Histograms of times and counters of tokens and endings."""

    def __init__(self, prefix: str, model_name: str, engine: str = ENGINE_LABEL) -> None:
        self.registry = CollectorRegistry()
        self.num_generation_tokens = 0
        self.labels = {"model_name": model_name, "engine": engine}
        self._last_tokens: dict[Job, float] = {}

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(
                f"{prefix}:{name}", text, list(self.labels), registry=self.registry, buckets=buckets
            )
            return made.labels(**self.labels)

        def counter(name: str, text: str) -> Counter:
            made = Counter(f"{prefix}:{name}", text, list(self.labels), registry=self.registry)
            return made.labels(**self.labels)

        self._first = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _LONG_SECONDS
        )
        self._between = histogram(
            "inter_token_latency_seconds",
            "Time per token behind the first; tokens committed together share theirs equally.",
            _SHORT_SECONDS,
        )
        self._queued = histogram(
            "request_queue_time_seconds", "From arrival to the first step.", _LONG_SECONDS
        )
        self._whole = histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _LONG_SECONDS
        )
        self._prompt = counter("prompt_tokens", "Prompt tokens of requests that got a token.")
        self._generated = counter("generation_tokens", "Tokens generated.")
        self._endings = Counter(
            f"{prefix}:request_success",
            "Answers by the way they ended; aborts and errors among them, as vLLM counts.",
            [*self.labels, "finished_reason"],
            registry=self.registry,
        )
        for ending in ("stop", "length", "abort", "error"):
            self._endings.labels(**self.labels, finished_reason=ending)

    def observe(self, job: Job, update: Update) -> None:
        """Take note of an update, the updates of a job in their order."""
        count = len(update.token_ids)
        if count:
            self.num_generation_tokens += count
            self._generated.inc(count)
            before = self._last_tokens.get(job)
            if before is None:
                self._first.observe(update.seconds - job.arrival)
                self._prompt.inc(len(job.prompt_token_ids))
                if job.scheduled is not None:
                    self._queued.observe(job.scheduled - job.arrival)
            else:
                for _ in range(count):
                    self._between.observe((update.seconds - before) / count)
            self._last_tokens[job] = update.seconds
        if update.ending is not None:
            self._last_tokens.pop(job, None)
            self._endings.labels(**self.labels, finished_reason=update.ending).inc()
            if update.ending in ("stop", "length"):
                self._whole.observe(update.seconds - job.arrival)

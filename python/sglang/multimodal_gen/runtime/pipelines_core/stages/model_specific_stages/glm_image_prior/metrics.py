# SPDX-License-Identifier: Apache-2.0
"""The AR client's part of ``/metrics``."""

from typing import Any


class PriorMetrics:
    """Counts requests, retries and cache hits; one a process. From any one thread."""

    def __init__(self, server_metrics: Any | None):
        """
        Args:
            server_metrics: upstream's `DiffusionMetrics`; None without --enable-metrics.
        """
        self._exported = None if server_metrics is None else _Exported(server_metrics._labels)
        self.hits = self.misses = self.retries = 0

    def begin(self) -> None:
        """A request gets its turn at the AR server."""
        if self._exported is not None:
            self._exported.inflight.inc()

    def end(self, status: int, seconds: float) -> None:
        """It left: 200, or the status of its error, or 499 where it was cancelled."""
        if self._exported is not None:
            self._exported.inflight.dec()
            self._exported.requests.labels(*self._exported.label_values, str(status)).inc()
            self._exported.seconds.observe(seconds)

    def retry(self) -> None:
        self.retries += 1
        if self._exported is not None:
            self._exported.retries.inc()

    def cached(self, hit: bool) -> None:
        """The cache was asked for a request with a seed."""
        self.hits += hit
        self.misses += not hit
        if self._exported is not None:
            (self._exported.hits if hit else self._exported.misses).inc()


class _Exported:
    """The Prometheus side."""

    def __init__(self, label_values: tuple[str, str]):
        # upstream sets up the multiprocess directory before prometheus_client may be imported
        from prometheus_client import Counter, Gauge, Histogram

        labels = ("role", "replica")
        self.label_values = label_values
        self.inflight = Gauge(
            "sglang:diffusion_prior_inflight",
            "Requests for prior tokens at the AR server.",
            labels,
            multiprocess_mode="livesum",
        ).labels(*label_values)
        self.requests = Counter(
            "sglang:diffusion_prior_requests_total",
            "Requests for prior tokens by how they ended (499: the client went away).",
            (*labels, "status"),
        )
        self.retries = Counter(
            "sglang:diffusion_prior_retries_total", "Attempts after the first one.", labels
        ).labels(*label_values)
        self.seconds = Histogram(
            "sglang:diffusion_prior_seconds",
            "Time at the AR server, retries included.",
            labels,
            buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300),
        ).labels(*label_values)
        cache = Counter(
            "sglang:diffusion_prior_cache_total",
            "Requests with a seed by whether their prior tokens were in the cache.",
            (*labels, "outcome"),
        )
        self.hits = cache.labels(*label_values, "hit")
        self.misses = cache.labels(*label_values, "miss")

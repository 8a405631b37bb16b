# SPDX-License-Identifier: Apache-2.0
"""What the step loop tells of itself: a log line every few seconds, its part of ``/metrics``."""

import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from sglang.multimodal_gen.runtime.utils.logging_utils import init_logger

logger = init_logger(__name__)

_LOG_SECONDS = 5.0


@dataclass
class _Window:
    """Sums between two log lines."""

    since: float = field(default_factory=time.monotonic)
    steps: int = 0
    sample_steps: int = 0
    rows: int = 0
    padded: int = 0
    admissions: int = 0
    admission_wait_s: float = 0.0


class LoopMetrics:
    """Counts steps, rows and admissions; one a replica."""

    def __init__(self, server_metrics: Any | None):
        """
        Args:
            server_metrics: upstream's `DiffusionMetrics`; None without --enable-metrics.
        """
        self._window = _Window()
        self._exported = None if server_metrics is None else _Exported(server_metrics._labels)

    def step(self, *, samples: int, rows: int, padded: int) -> None:
        """One shared step of so many samples, rows whose output is used, and rows of padding."""
        window = self._window
        window.steps += 1
        window.sample_steps += samples
        window.rows += rows
        window.padded += padded
        if self._exported is not None:
            self._exported.steps.inc()
            self._exported.rows_used.inc(rows)
            self._exported.rows_padded.inc(padded)

    def admit(self, wait_s: float) -> None:
        """A request whose preparation begins, after it waited so long."""
        self._window.admissions += 1
        self._window.admission_wait_s += wait_s
        if self._exported is not None:
            self._exported.admission_wait.observe(wait_s)

    def observe(self, *, running: int, waiting: int) -> None:
        """Once a turn of the loop."""
        if self._exported is not None:
            self._exported.observe(running, waiting)
        window, now = self._window, time.monotonic()
        seconds = now - window.since
        if seconds < _LOG_SECONDS:
            return
        if window.steps:
            logger.info(
                "Running %d, waiting %d; %.1f steps/s of %.1f samples, %.1f rows and %.1f rows of "
                "padding; admission wait %.2f s",
                running,
                waiting,
                window.steps / seconds,
                window.sample_steps / window.steps,
                window.rows / window.steps,
                window.padded / window.steps,
                window.admission_wait_s / max(1, window.admissions),
            )
        self._window = _Window(since=now)


def finish_aborted(server_metrics: Any, key: Hashable) -> None:
    """What upstream's `DiffusionMetrics.finish` does, with a status beside its two."""
    state = server_metrics._requests.pop(key, None)
    if state is None:
        return
    start, is_warmup, dispatched = state
    if dispatched:
        server_metrics._running -= 1
    else:
        server_metrics._queued -= 1
    labels = (*server_metrics._labels, "aborted", str(is_warmup).lower())
    server_metrics.requests.labels(*labels).inc()
    server_metrics.latency.labels(*labels).observe(time.monotonic() - start)
    server_metrics._publish_depths()


class _Exported:
    """The Prometheus side."""

    def __init__(self, label_values: tuple[str, str]):
        # upstream sets up the multiprocess directory before prometheus_client may be imported
        from prometheus_client import Counter, Gauge, Histogram

        labels = ("role", "replica")

        def gauge(name: str, text: str) -> Any:
            return Gauge(name, text, labels, multiprocess_mode="mostrecent").labels(*label_values)

        self.running = gauge(
            "sglang:diffusion_running_samples", "Requests between their first and last step."
        )
        self.waiting = gauge(
            "sglang:diffusion_waiting_items", "Requests and control requests not yet begun."
        )
        self.steps = Counter(
            "sglang:diffusion_shared_steps_total", "Steps of the denoising loop.", labels
        ).labels(*label_values)
        rows = Counter(
            "sglang:diffusion_step_rows_total",
            "DiT rows of the denoising loop: used, or padded up to a row bucket.",
            (*labels, "kind"),
        )
        self.rows_used = rows.labels(*label_values, "used")
        self.rows_padded = rows.labels(*label_values, "padded")
        self.admission_wait = Histogram(
            "sglang:diffusion_admission_wait_seconds",
            "Time from acceptance to the start of preparation.",
            labels,
            buckets=(0.001, 0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300),
        ).labels(*label_values)
        self._last: tuple[int, int] | None = None

    def observe(self, running: int, waiting: int) -> None:
        if self._last != (running, waiting):  # the loop turns often, the file is shared
            self._last = (running, waiting)
            self.running.set(running)
            self.waiting.set(waiting)

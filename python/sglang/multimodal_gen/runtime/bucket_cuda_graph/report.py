# SPDX-License-Identifier: Apache-2.0
"""The graphs of a server as a table in its log and as metrics."""

from typing import Any

from sglang.multimodal_gen.runtime.observability.metrics import get_metrics
from sglang.multimodal_gen.runtime.utils.logging_utils import init_logger

logger = init_logger(__name__)

_HEADER = ("bucket graph", "capture s", "of it forwards", "replay ms", "eager ms", "MB", "differs")


def log_graphs(graphs: Any) -> None:
    """One table of all graphs, after start-up's captures."""
    if not (graphs.graphs or graphs.refused):
        return
    rows = [
        (
            bucket.label,
            f"{graph.capture_s:.2f}",
            f"{graph.forwards_s:.2f}",
            f"{graph.cost.replay_ms:.2f}",
            f"{graph.cost.eager_ms:.2f}",
            f"{(graph.own_bytes + graph.pool_bytes) / 2**20:.0f}",
            f"{graph.error:.0e}" if graph.error else "no",
        )
        for bucket, graph in graphs.graphs.items()
    ]
    rows += [(bucket.label, f"none: {reason}") for bucket, reason in graphs.refused.items()]
    widths = [
        max(len(row[i]) for row in [_HEADER, *rows] if len(row) == len(_HEADER))
        for i in range(len(_HEADER))
    ]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
        if len(row) == len(_HEADER)
        else "  ".join(row)
        for row in [_HEADER, *rows]
    ]
    logger.info(
        "%d bucket graphs, %.0f of %.0f MB\n%s",
        len(graphs.graphs),
        graphs.budget.used / 2**20,
        graphs.budget.limit / 2**20,
        "\n".join(lines),
    )


def publish_graphs(graphs: Any) -> None:
    """Set the metrics of a server with --enable-metrics to what the graphs have counted."""
    metrics = get_metrics()
    if metrics is None:
        return
    if not hasattr(metrics, "bucket_graphs"):
        metrics.bucket_graphs = GraphMetrics(metrics._labels)
    metrics.bucket_graphs.publish(graphs)


class GraphMetrics:
    """Gauges of the counts that `BucketGraphs` keeps, set now and then and not at every step."""

    def __init__(self, labels: tuple[str, ...]):
        """
        Args:
            labels: values of ``role`` and ``replica``.
        """
        from prometheus_client import Gauge

        def gauge(name: str, text: str, *names: str) -> Gauge:
            return Gauge(
                f"sglang:diffusion_bucket_graph_{name}",
                text,
                ("role", "replica", *names),
                multiprocess_mode="mostrecent",
            )

        self._labels = labels
        self._seen: set[str] = set()
        self._replays = gauge("replays", "Steps replayed.", "bucket")
        self._padding = gauge("padding_rows", "Rows replayed for padding alone.", "bucket")
        self._seconds = gauge("capture_seconds", "Seconds its capture took.", "bucket")
        self._bytes = gauge("bytes", "Device memory it added; 0 once it is gone.", "bucket")
        self._misses = gauge("misses", "Steps that ran eagerly.", "reason")
        self._share = gauge("replayed_share", "Share of all steps that replayed.")
        self._used = gauge("memory_bytes", "Device memory of all graphs.")

    def publish(self, graphs: Any) -> None:
        held = {bucket.label: graph for bucket, graph in graphs.graphs.items()}
        self._seen |= held.keys()
        for label in self._seen:
            labels = (*self._labels, label)
            self._replays.labels(*labels).set(graphs.replays[label])
            self._padding.labels(*labels).set(graphs.padding_rows[label])
            graph = held.get(label)
            size = graph.own_bytes + graph.pool_bytes if graph else 0
            self._bytes.labels(*labels).set(size)
            if graph:
                self._seconds.labels(*labels).set(graph.capture_s)
        for reason, count in graphs.misses.items():
            self._misses.labels(*self._labels, reason).set(count)
        self._share.labels(*self._labels).set(graphs.demand.replayed_share)
        self._used.labels(*self._labels).set(graphs.budget.used)

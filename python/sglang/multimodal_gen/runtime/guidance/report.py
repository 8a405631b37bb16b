# SPDX-License-Identifier: Apache-2.0
"""What was run: counted where it runs, said in the answer, the log and the metrics."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from sglang.multimodal_gen.configs.guidance_curves import (
    COND_BRANCH,
    UNCOND_BRANCH,
    GuidanceSchedule,
)
from sglang.multimodal_gen.runtime.distributed.parallel_state import (
    get_cfg_group,
    get_classifier_free_guidance_world_size,
)
from sglang.multimodal_gen.runtime.observability.metrics import get_metrics
from sglang.multimodal_gen.runtime.utils.logging_utils import init_logger

logger = init_logger(__name__)


@dataclass
class RowCounter:
    """DiT rows whose output was used, by branch, on this rank.

    Idle ranks, warm-up, padding and reference-image forwards do not count.
    """

    rows: Counter = field(default_factory=Counter)

    def add(self, branch: str, rows: int) -> None:
        self.rows[branch] += rows

    def total(self) -> dict[str, int]:
        """Rows summed over the CFG ranks, which run different branches.

        TP and SP ranks run parts of the same rows, so they are counted once. A collective over
        gloo where CFG parallel is on: every CFG rank calls it.
        """
        counts = [self.rows[COND_BRANCH], self.rows[UNCOND_BRANCH]]
        if get_classifier_free_guidance_world_size() > 1:
            summed = torch.tensor(counts)
            dist.all_reduce(summed, group=get_cfg_group().cpu_group)
            counts = summed.tolist()
        return dict(zip((COND_BRANCH, UNCOND_BRANCH), counts))


def build_report(
    curve: str | list[float], schedule: GuidanceSchedule, rows: dict[str, int], images: int
) -> dict[str, Any]:
    """The ``guidance`` object of the response; ``forwards`` are for one image."""
    return {
        "curve": curve,
        "buckets": [run.to_dict() for run in schedule.bucket_runs()],
        "forwards": {branch: count // images for branch, count in rows.items()},
    }


def publish_report(batch: Any, report: dict[str, Any], rows: dict[str, int]) -> None:
    """Hang the report on the request's metrics, which travel with its result, and log it."""
    batch.metrics.guidance = report
    scales = " ".join(
        f"{run['bucket']}:{run['steps'][0]}-{run['steps'][1]}@{_short(run['scale'])}"
        for run in report["buckets"]
    )
    logger.info(
        "Guidance of %s: curve=%s buckets=[%s] forwards=%d cond + %d uncond an image",
        batch.request_id,
        report["curve"],
        scales,
        report["forwards"][COND_BRANCH],
        report["forwards"][UNCOND_BRANCH],
    )
    metrics = get_metrics()
    if metrics is not None:
        for branch, count in rows.items():
            metrics.guidance_forwards(branch).inc(count)


def _short(scale: float | list[float]) -> str:
    return "-".join(f"{s:.4g}" for s in scale) if isinstance(scale, list) else f"{scale:.4g}"

# SPDX-License-Identifier: Apache-2.0
"""What traffic asked for, and which graph to capture next at an idle moment. Plain data."""

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field

from sglang.multimodal_gen.runtime.bucket_cuda_graph.buckets import GraphBucket

GOAL = 0.9  # of the steps seen should replay
_FORGET_AFTER = 10_000  # steps; then all counts are halved, so that old traffic fades


@dataclass
class Demand:
    """Steps by the bucket that would hold them; None for those that no bucket holds."""

    steps: Counter = field(default_factory=Counter)
    replayed: int = 0
    total: int = 0

    def add(self, bucket: GraphBucket | None, *, replayed: bool) -> None:
        self.steps[bucket] += 1
        self.total += 1
        self.replayed += replayed
        if sum(self.steps.values()) >= _FORGET_AFTER:
            self.steps = Counter({key: n // 2 for key, n in self.steps.items() if n > 1})

    @property
    def replayed_share(self) -> float:
        """Of all steps since the start."""
        return self.replayed / self.total if self.total else 0.0

    def next_capture(
        self, captured: Set[GraphBucket], refused: Set[GraphBucket]
    ) -> GraphBucket | None:
        """The uncaptured bucket that covers most of the steps, until `GOAL` of them is covered.

        Args:
            captured: what has a graph.
            refused: what must not be tried again: it failed, differed or does not pay.
        """
        total = sum(self.steps.values())
        covered = sum(self.steps[bucket] for bucket in captured)
        if not total or covered >= GOAL * total:
            return None
        wanted = [
            (steps, bucket)
            for bucket, steps in self.steps.items()
            if bucket is not None and bucket not in captured and bucket not in refused
        ]
        return max(wanted, default=(0, None))[1]

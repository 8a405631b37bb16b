# SPDX-License-Identifier: Apache-2.0
"""The memory that graphs may take, and which goes first when it is full. Plain data."""

from collections import OrderedDict
from dataclasses import dataclass, field

from sglang.multimodal_gen.runtime.bucket_cuda_graph.buckets import GraphBucket


@dataclass
class GraphBudget:
    """Bytes held by graphs.

    A graph's own bytes come back when it goes. The pool that all graphs share has the size of the
    largest need and comes back when the last graph goes.

    Attributes:
        limit: bytes.
        own: of each graph, least recently used first.
        pool: bytes of the shared pool.
    """

    limit: int
    own: OrderedDict[GraphBucket, int] = field(default_factory=OrderedDict)
    pool: int = 0

    @property
    def used(self) -> int:
        return self.pool + sum(self.own.values())

    def use(self, bucket: GraphBucket) -> None:
        self.own.move_to_end(bucket)

    def add(self, bucket: GraphBucket, own: int, pool: int) -> None:
        self.own[bucket] = own
        self.pool = pool

    def remove(self, bucket: GraphBucket) -> None:
        del self.own[bucket]
        if not self.own:
            self.pool = 0

    def make_room(self, own: int, pool: int) -> list[GraphBucket] | None:
        """Graphs to drop, least recently used first, before one of this size is captured.

        Args:
            own: bytes of the new graph alone.
            pool: bytes that the pool must have for it.

        Returns:
            None where it does not fit even beside no other graph.
        """
        if own + pool > self.limit:
            return None
        pool = max(pool, self.pool)
        held = dict(self.own)
        dropped = []
        while held and pool + own + sum(held.values()) > self.limit:
            bucket = next(iter(held))
            del held[bucket]
            dropped.append(bucket)
        return dropped

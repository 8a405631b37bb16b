# SPDX-License-Identifier: Apache-2.0
"""Ranks agree on a plan before they act on it."""

import hashlib
from collections.abc import Hashable

import torch
import torch.distributed as dist

from sglang.multimodal_gen.runtime.distributed.parallel_state import get_replica_group
from sglang.multimodal_gen.runtime.guidance.plan import BucketPlan

_REFUSED = bytes(32)  # the digest of no plan


class PlanMismatch(RuntimeError):
    """The ranks of one replica do not hold the same usable plan. Raised on all of them."""


def agree_on_plan(
    plan: BucketPlan | None, *, acts_on: Hashable = None, refusal: str | None = None
) -> None:
    """Compare the plan's digest on every rank of the replica, over gloo.

    One rank that refused alone would leave the others waiting in a collective, so a rank that
    cannot run its plan comes here too, with its `refusal`.

    Args:
        plan: this rank's; None only beside a `refusal`.
        acts_on: what else must be alike: plain values with an exact repr.

    Raises:
        PlanMismatch: on every rank, if a rank refuses or holds another plan.
    """
    digest = _REFUSED
    if refusal is None:
        digest = hashlib.sha256(plan.digest() + repr(acts_on).encode()).digest()
    group = get_replica_group()
    if group.world_size > 1:
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        gathered = [torch.empty_like(mine) for _ in range(group.world_size)]
        dist.all_gather(gathered, mine, group=group.cpu_group)
        digests = [bytes(other.tolist()) for other in gathered]
    else:
        digests = [digest]
    if refusal is not None:
        raise PlanMismatch(f"bucket plan refused: {refusal}")
    differing = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if _REFUSED in digests:
        raise PlanMismatch(f"bucket plan refused by rank {digests.index(_REFUSED)} of the replica")
    if differing:
        raise PlanMismatch(f"bucket plan of ranks {differing} differs from that of rank 0")

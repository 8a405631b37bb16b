# SPDX-License-Identifier: Apache-2.0
"""Ranks agree on a plan before they act on it."""

import hashlib
from collections.abc import Hashable
from datetime import timedelta

import torch
import torch.distributed as dist

from sglang.multimodal_gen.runtime.distributed.parallel_state import get_replica_group
from sglang.multimodal_gen.runtime.guidance.plan import BucketPlan

AGREE_SECONDS = 8.0  # how long a rank that failed waits for the others
_REFUSED = bytes(32)  # the digest of no plan


class PlanMismatch(RuntimeError):
    """The ranks of one replica do not hold the same usable plan. Raised on all of them."""


class RanksLost(RuntimeError):
    """This rank failed and the others did not come to agree on it: they are inside a collective."""


def agree_on_plan(
    plan: BucketPlan | None,
    *,
    acts_on: Hashable = None,
    refusal: str | None = None,
    timeout_s: float | None = None,
) -> None:
    """Compare the plan's digest on every rank of the replica, over gloo.

    One rank that refused alone would leave the others waiting in a collective, so a rank that
    cannot run its plan comes here too, with its `refusal`.

    Args:
        plan: this rank's; None only beside a `refusal`.
        acts_on: what else must be alike: plain values with an exact repr.
        timeout_s: how long to wait for the other ranks; None waits as long as they need.

    Raises:
        PlanMismatch: on every rank, if a rank refuses or holds another plan.
        RanksLost: if the time is over.
    """
    digest = _REFUSED
    if refusal is None:
        digest = hashlib.sha256(plan.digest() + repr(acts_on).encode()).digest()
    group = get_replica_group()
    if group.world_size > 1:
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        gathered = [torch.empty_like(mine) for _ in range(group.world_size)]
        work = dist.all_gather(gathered, mine, group=group.cpu_group, async_op=True)
        _wait(work, timeout_s, refusal)
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


def _wait(work: dist.Work, timeout_s: float | None, refusal: str | None) -> None:
    if timeout_s is None:
        work.wait()
        return
    try:
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise RanksLost(f"the other ranks go on without this one: {refusal}") from error

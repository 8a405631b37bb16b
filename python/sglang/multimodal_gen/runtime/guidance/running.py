# SPDX-License-Identifier: Apache-2.0
"""What the step loop keeps of a request, and what its ranks tell each other."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sglang.multimodal_gen.runtime.guidance.plan import PlannedSample
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch, Req
from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.glm_image_prior import (  # noqa: E501
    Prior,
)
from sglang.multimodal_gen.runtime.pipelines_core.stages.stepwise_denoising import RunningSample


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What all ranks do next.

    Attributes:
        action: ``prepare`` or ``dispatch`` a waiting item, ``step`` or ``idle``.
        waiting_index: of that item.
        samples: numbers of the running samples that step.
        priors: for the item to prepare, where an AR server wrote them: one a request, or an error.
    """

    action: str
    waiting_index: int = 0
    samples: tuple[int, ...] = ()
    priors: list[Prior] | Exception | None = None

    @property
    def repeatable(self) -> bool:
        """Whether the same words can mean the same again: no waiting item is taken by them."""
        return self.action in ("step", "idle")


@dataclass(eq=False)
class Admitted:
    """A waiting item that was let in: a request, or a group of requests with one answer.

    Attributes:
        outputs: of its requests, in their order; filled as they finish.
    """

    identity: bytes | None
    item: Req | list[Req]
    start_time: float
    outputs: list[OutputBatch | None] = field(init=False)
    _claims: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.outputs = [None] * len(self.requests)

    @property
    def requests(self) -> list[Req]:
        return requests_of(self.item)

    def claim_answer(self) -> bool:
        """True once: the loop and the decoding thread may both have an answer."""
        return next(self._claims) == 0


@dataclass(eq=False)
class Running:
    """A sample between its first and its last step.

    Attributes:
        number: counts admissions, lower is older.
        index: of its request in `admitted`.
    """

    number: int
    admitted: Admitted
    index: int
    sample: RunningSample

    @property
    def key(self) -> Any:
        return self.sample.share_key or self.number

    def planned(self) -> PlannedSample:
        """Its steps from the next one on."""
        step, schedule = self.sample.step, self.sample.run.schedule
        return PlannedSample(
            sample_id=str(self.sample.batch.request_id),
            images=self.sample.images,
            first_step=step,
            bucket_ids=schedule.bucket_ids[step:],
            scales=schedule.scales[step:],
        )


def requests_of(item: Any) -> list[Req]:
    """The generation requests of a waiting item; none for a control request."""
    if isinstance(item, Req):
        return [item]
    if isinstance(item, list):
        return [req for req in item if isinstance(req, Req)]
    return []


def images_of(item: Any) -> int:
    return sum(max(1, int(req.num_outputs_per_prompt or 1)) for req in requests_of(item))


def joins(item: Any) -> bool:
    """Whether all of an item can advance step by step beside others."""
    requests = requests_of(item)
    return bool(requests) and not any(
        req.is_warmup
        or req.profile
        or req.realtime_session_id
        or req.extra.get("server_internal_prewarm")
        for req in requests
    )


def label(item: Any) -> str:
    requests = requests_of(item)
    return f"request {requests[0].request_id}" if requests else type(item).__name__


def has_request_id(item: Any, request_id: str) -> bool:
    return any(req.request_id == request_id for req in requests_of(item))

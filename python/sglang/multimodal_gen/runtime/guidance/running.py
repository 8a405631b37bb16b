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
from sglang.multimodal_gen.runtime.utils.trace_wrapper import DiffStage

# of ``--enable-trace``; upstream's loop makes them, outermost first
_SPANS = (DiffStage.SCHEDULER_DISPATCH, DiffStage.GPU_FORWARD)


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
        for context in self._trace_contexts:
            context.rebuild_thread_context()
            for stage in _SPANS:
                context.trace_slice_start(stage.stage_name, level=stage.level)

    @property
    def requests(self) -> list[Req]:
        return requests_of(self.item)

    @property
    def _trace_contexts(self) -> list[Any]:
        """Of the requests; several images of one request may share theirs."""
        return list({id(req.trace_ctx): req.trace_ctx for req in self.requests}.values())

    def claim_answer(self) -> bool:
        """True once: the loop and the decoding thread may both have an answer."""
        if next(self._claims) > 0:
            return False
        for context in self._trace_contexts:
            for stage in reversed(_SPANS):
                outermost = stage is _SPANS[0]
                context.trace_slice_end(
                    stage.stage_name, level=stage.level, thread_finish_flag=outermost
                )
        return True


@dataclass(eq=False)
class Running:
    """A sample between its first and its last step.

    Attributes:
        number: counts admissions, lower is older.
        index: of its request in `admitted`.
        row_limit: rows of a step that it shares, after a larger one failed.
    """

    number: int
    admitted: Admitted
    index: int
    sample: RunningSample
    row_limit: int | None = None

    @property
    def key(self) -> Any:
        return self.sample.share_key or self.number

    @property
    def most_rows(self) -> int | None:
        limits = (self.row_limit, self.sample.most_rows)
        return min((limit for limit in limits if limit is not None), default=None)

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

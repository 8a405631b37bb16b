# SPDX-License-Identifier: Apache-2.0
"""Step-level continuous batching: requests join and leave the running batch between steps.

`BucketScheduler` takes the place of the upstream scheduler's event loop and keeps using its
sockets, queues, handlers and worker. One turn of the loop: receive; decide, on rank 0 alone; send
the decision to the other ranks; act on it. A decision is one of: prepare the oldest waiting
request that is ready, run one step of some running samples, run one item upstream's way, or
nothing.
"""

import time
from collections import deque
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import zmq

from sglang.multimodal_gen.runtime.distributed.parallel_state import get_replica_group
from sglang.multimodal_gen.runtime.distributed.utils import broadcast_pyobj
from sglang.multimodal_gen.runtime.guidance.abort import AbortReq
from sglang.multimodal_gen.runtime.guidance.agreement import agree_on_plan
from sglang.multimodal_gen.runtime.guidance.external_prior import (
    Prior,
    assign_prior,
    build_prior_fetcher,
)
from sglang.multimodal_gen.runtime.guidance.plan import BucketPlan, PlannedSample
from sglang.multimodal_gen.runtime.guidance.policy import Candidate, FairTurns
from sglang.multimodal_gen.runtime.guidance.trace import ScheduleTrace
from sglang.multimodal_gen.runtime.managers.request_gc import request_gc
from sglang.multimodal_gen.runtime.managers.scheduler import Scheduler, _DeferredOutput
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch, Req
from sglang.multimodal_gen.runtime.pipelines_core.stages.stepwise_denoising import (
    RunningSample,
    StepwiseDenoisingMixin,
)
from sglang.multimodal_gen.runtime.platforms import current_platform
from sglang.multimodal_gen.runtime.utils.logging_utils import init_logger

logger = init_logger(__name__)

_LOG_SECONDS = 5.0
_IDLE_SECONDS = 1.0  # a new request ends the wait
_BUSY_SECONDS = 0.001  # something that no socket tells of is on its way
_MAX_RECEIVE_ERRORS = 3  # in a row, as upstream


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What all ranks do next.

    Attributes:
        action: ``prepare`` or ``dispatch`` a waiting item, ``step`` or ``idle``.
        waiting_index: of that item.
        samples: numbers of the running samples that step.
        prior: for the request to prepare, where an AR server wrote it: host tokens, or an error.
    """

    action: str
    waiting_index: int = 0
    samples: tuple[int, ...] = ()
    prior: Prior | Exception | None = None


@dataclass(eq=False)
class Running:
    """A sample with what its answer needs; numbers count admissions, lower is older."""

    number: int
    item: tuple[bytes | None, Req]
    sample: RunningSample
    start_time: float

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


@dataclass
class Window:
    """Counters between two log lines."""

    since: float = field(default_factory=time.monotonic)
    steps: int = 0
    rows: int = 0
    sample_steps: int = 0
    admissions: int = 0
    admission_wait_s: float = 0.0


class BucketScheduler:
    """The loop. Every rank runs one; all see the same requests in the same order."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.worker = scheduler.worker
        self.server_args = scheduler.server_args
        self.pipeline = self.worker.pipeline
        index, self.stage = find_stepwise_stage(self.pipeline.stages)
        self.stages_before = self.pipeline.stages[:index]
        self.stages_after = self.pipeline.stages[index + 1 :]
        self.group = get_replica_group()
        self.decides = self.group.rank_in_group == 0
        self.running: dict[int, Running] = {}
        self.turns = FairTurns()
        self.agreed: tuple | None = None  # what the ranks agreed to step next
        self.fetcher = (
            build_prior_fetcher(self.stages_before, self.server_args) if self.decides else None
        )
        self.priors: dict[int, Future] = {}  # by id of the waiting request
        path = getattr(self.server_args, "schedule_trace", None)
        self.trace = ScheduleTrace(path) if path and self.decides else None
        self.admitted = 0
        self.may_prepare = True
        self.receive_errors = 0
        self.window = Window()

    @property
    def waiting(self) -> deque:
        return self.scheduler.waiting_queue

    # --- the loop -------------------------------------------------------------------------------

    def event_loop(self) -> None:
        scheduler = self.scheduler
        self.worker.defer_cache_release = True
        logger.info(
            "Continuous batching: up to %d samples, %d rows a step",
            self.server_args.max_running_samples,
            self.server_args.max_rows,
        )
        while scheduler._running or self.running:
            scheduler._reap_finalizes()
            self._receive()
            self._act(self._agree(self._decide() if self.decides else None))
            self._log()
        if self.fetcher is not None:
            self.fetcher.close()
        if self.trace is not None:
            self.trace.close()
        scheduler._drain_deferred_replies()
        if scheduler.receiver is not None:
            scheduler.receiver.close()
        scheduler._cleanup_disagg()
        scheduler.context.destroy(linger=0)

    def _receive(self) -> None:
        scheduler = self.scheduler
        try:
            received = scheduler.process_received_reqs_with_req_based_warmup(
                scheduler.recv_reqs()
            )
            self.receive_errors = 0
        except Exception:
            self.receive_errors += 1
            logger.exception("Error receiving requests (%d in a row)", self.receive_errors)
            if self.receive_errors >= _MAX_RECEIVE_ERRORS:
                raise
            return
        now = time.monotonic()
        for identity, item in received:
            if isinstance(item, AbortReq):
                self._abort(identity, item)
                continue
            self.waiting.append((identity, item, now))
            req = item[0] if isinstance(item, list) else item
            if scheduler.metrics is not None and isinstance(req, Req):
                scheduler.metrics.enqueue(id(item), is_warmup=req.is_warmup, now=now)
            if self.fetcher is not None and joins(item):
                prior = self.fetcher.fetch(item)
                if prior is not None:
                    self.priors[id(item)] = prior

    def _abort(self, identity: bytes | None, abort: AbortReq) -> None:
        """On every rank between the same two steps: requests arrive in the same order."""
        gone = OutputBatch(error=f"request {abort.request_id} was aborted: its client is gone")
        for entry in [e for e in self.waiting if request_id(e[1]) == abort.request_id]:
            self.waiting.remove(entry)
            self.priors.pop(id(entry[1]), None)
            self._answer(entry[:2], gone)
        for running in list(self.running.values()):
            if request_id(running.item[1]) == abort.request_id:
                del self.running[running.number]
                self.stage.forget_packed()
                self._answer(running.item, gone)
        self._answer((identity, abort), OutputBatch())

    def _decide(self) -> Decision:
        candidates = [
            Candidate(
                sample_id=number, key=running.key, rows=running.sample.rows, arrival=number
            )
            for number, running in self.running.items()
        ]
        group = self.turns.next_group(candidates, self.server_args.max_rows)
        if self.may_prepare or not group:
            admission = self._decide_admission()
            if admission is not None:
                return admission
        if group:
            return Decision(action="step", samples=tuple(c.sample_id for c in group))
        return Decision(action="idle")

    def _decide_admission(self) -> Decision | None:
        """The oldest waiting item that can go on now."""
        full = len(self.running) >= self.server_args.max_running_samples
        for index, (_, item, _) in enumerate(self.waiting):
            if not joins(item):
                # what changes the weights waits for the running samples and holds the others back
                if isinstance(item, (Req, list)) or (index == 0 and not self.running):
                    return Decision(action="dispatch", waiting_index=index)
                return None
            prior = self.priors.get(id(item))
            if full or (prior is not None and not prior.done()):
                continue
            if prior is None:
                return Decision(action="prepare", waiting_index=index)
            del self.priors[id(item)]
            error = prior.exception()
            # plain text travels to the other ranks whatever the client raised
            written = prior.result() if error is None else RuntimeError(str(error))
            return Decision(action="prepare", waiting_index=index, prior=written)
        return None

    def _agree(self, decision: Decision | None) -> Decision:
        """Rank 0's decision, on every rank."""
        if self.group.world_size == 1:
            return decision
        (decided,) = broadcast_pyobj(
            [decision] if self.decides else [],
            self.group.rank,
            self.group.cpu_group,
            src=self.group.ranks[0],
        )
        return decided

    def _act(self, decision: Decision) -> None:
        # one preparation between two steps: it must not stall the samples that run
        self.may_prepare = decision.action in ("step", "idle")
        if decision.action == "prepare":
            self._prepare(*self._take(decision), decision.prior)
        elif decision.action == "dispatch":
            self._dispatch(*self._take(decision))
        elif decision.action == "step":
            self._step([self.running[number] for number in decision.samples])
        else:
            self._wait()

    def _take(self, decision: Decision) -> tuple[bytes | None, Any, float]:
        entry = self.waiting[decision.waiting_index]
        del self.waiting[decision.waiting_index]
        return entry

    def _wait(self) -> None:
        self.stage.forget_packed()
        alone = self.group.world_size == 1
        if self.scheduler._inflight_finalizes or self.priors:
            self.scheduler._wait_idle(_BUSY_SECONDS)
        elif alone and self.server_args.sleep_on_idle:
            self.scheduler._wait_idle(_IDLE_SECONDS)
        self.worker.release_cache_if_idle()

    # --- actions --------------------------------------------------------------------------------

    def _prepare(
        self,
        identity: bytes | None,
        req: Req,
        arrived: float,
        prior: Prior | Exception | None,
    ) -> None:
        """Run the stages before denoising; the request joins at the next step."""
        item = (identity, req)
        now = time.monotonic()
        self.window.admissions += 1
        self.window.admission_wait_s += now - arrived
        if self.scheduler.metrics is not None:
            self.scheduler.metrics.dispatch(id(req))
        try:
            if self.worker.is_sleeping():
                raise RuntimeError("Server is sleeping. Call resume_memory_occupation first.")
            request_gc.collect_after_warmup()
            req.log(server_args=self.server_args)
            stages = self.stages_before
            if isinstance(prior, Exception):
                raise prior
            if prior is not None:
                assign_prior(req, prior)
                stages = stages[1:]
            prepared = self._run_stages(stages, req)
            with self._inside_stage(prepared):
                sample = self.stage.start_sample(prepared, self.server_args)
        except Exception as error:
            self._fail(item, error)
            return
        self.admitted += 1
        self.running[self.admitted] = Running(self.admitted, item, sample, now)
        self._span("prepare", self.admitted, now, request=req.request_id)

    def _step(self, group: list[Running]) -> None:
        start = time.monotonic()
        samples = [running.sample for running in group]
        self.window.steps += 1
        self.window.sample_steps += len(group)
        self.window.rows += sum(sample.rows for sample in samples)
        before = [sample.step for sample in samples]
        plan = BucketPlan(samples=tuple(running.planned() for running in group))
        try:
            self._agree_on_set(group, plan)
            self._advance(samples)
        except Exception as error:
            if self.group.world_size > 1:
                raise  # the other ranks may be inside this step's collectives
            logger.error("A step of %d samples failed: %s", len(group), error, exc_info=True)
            self._advance_one_by_one(group, before)
        self.turns.charge(group[0].key, time.monotonic() - start)
        self._trace_step(group, plan, start)
        for running in group:
            if running.number in self.running and running.sample.done:
                self._finish(running)

    def _agree_on_set(self, group: list[Running], plan: BucketPlan) -> None:
        """Ranks compare plans when the set of samples is another, not at every step."""
        expected = [(running.number, running.sample.step) for running in group]
        if self.agreed != expected:
            agree_on_plan(plan, acts_on=tuple(running.key for running in group))
        self.agreed = [(number, step + 1) for number, step in expected]

    def _advance(self, samples: list[RunningSample]) -> None:
        with self._inside_stage(samples[0].batch):
            self.stage.step_samples(samples, self.server_args)

    def _advance_one_by_one(self, group: list[Running], before: list[int]) -> None:
        """After a shared step that raised: only a sample that fails again gets the error."""
        self.agreed = None
        self.stage.forget_packed()
        for running, step in zip(group, before):
            if running.sample.step > step:
                continue
            try:
                self._advance([running.sample])
            except Exception as error:
                del self.running[running.number]
                self._fail(running.item, error)

    def _finish(self, running: Running) -> None:
        """Decode, and answer; saving and the answer leave the loop where upstream's would."""
        del self.running[running.number]
        worker, req = self.worker, running.sample.batch

        def finish() -> OutputBatch:
            with self._inside_stage(req):
                self.stage.finish_sample(running.sample, self.server_args)
            return self._run_stages(self.stages_after, req)

        start = time.monotonic()
        output = worker._execute_forward_common(
            req,
            forward_fn=finish,
            log_reqs=[],
            return_req=False,
            save_output_paths=lambda output_batch: worker._save_output_paths(req, output_batch),
            error_context=label(req),
            execution_start_time=running.start_time,
            defer_finalize=self.scheduler._async_output_save,
        )
        self._span("decode", running.number, start, request=req.request_id)
        self._answer_or_defer(running.item, output, worker.take_deferred_finalize())

    def _dispatch(self, identity: bytes | None, item: Any, _arrived: float) -> None:
        """Run an item upstream's way, whole: control requests, warm-up, grouped requests."""
        scheduler = self.scheduler
        self.agreed = None
        if scheduler.metrics is not None:
            scheduler.metrics.dispatch(id(item))
        try:
            output = scheduler._dispatch_single_request(item)
        except Exception as error:
            self._fail((identity, item), error)
            return
        if isinstance(output, _DeferredOutput):
            scheduler._submit_deferred_reply(item=(identity, item), deferred=output)
        elif isinstance(output, OutputBatch):
            self._answer((identity, item), output)
        else:
            scheduler._return_results_sequentially([(identity, item)], output.outputs)

    # --- pieces ---------------------------------------------------------------------------------

    def _run_stages(self, stages: list, req: Req) -> Any:
        self.pipeline._install_component_residency_manager(self.server_args)
        with current_platform.inference_mode(), torch.no_grad():
            return self.pipeline.executor.execute(stages, req, self.server_args)

    @contextmanager
    def _inside_stage(self, req: Req):
        """What the executor puts around a stage, around a part of this one."""
        executor = self.pipeline.executor
        with ExitStack() as stack:
            stack.enter_context(current_platform.inference_mode())
            stack.enter_context(torch.no_grad())
            stack.enter_context(
                executor._component_residency_request([self.stage], req, self.server_args)
            )
            executor.before_stage(self.stage, 0, req, self.server_args)
            executor.component_residency_manager.begin_stage()
            stack.callback(executor.component_residency_manager.end_stage)
            stack.callback(self.stage._finish_active_component_use)
            yield

    def _fail(self, item: tuple[bytes | None, Any], error: Exception) -> None:
        logger.error("Error executing %s: %s", label(item[1]), error, exc_info=error)
        self._answer(item, OutputBatch(error=f"Error executing {label(item[1])}: {error}"))

    def _answer_or_defer(self, item, output: OutputBatch, finalize: Any) -> None:
        if finalize is None:
            self._answer(item, output)
        else:
            deferred = _DeferredOutput(output_batch=output, finalize=finalize)
            self.scheduler._submit_deferred_reply(item=item, deferred=deferred)

    def _answer(self, item: tuple[bytes | None, Any], output: OutputBatch) -> None:
        try:
            self.scheduler._return_item_result(item, output)
        except zmq.ZMQError as error:
            logger.error("ZMQ error sending reply: %s", error)

    def _span(self, name: str, lane: int, start: float, **args: Any) -> None:
        if self.trace is not None:
            self.trace.span(name, lane, start, time.monotonic(), **args)

    def _trace_step(self, group: list[Running], plan: BucketPlan, start: float) -> None:
        if self.trace is None:
            return
        steps = plan.at(0)
        self._span("step", 0, start, samples=len(steps), rows=sum(step.rows for step in steps))
        for running, step in zip(group, steps):
            name = f"bucket {step.bucket}"
            args = dict(step=step.step, scale=step.scale, rows=step.rows)
            self._span(name, running.number, start, **args)

    def _log(self) -> None:
        window, now = self.window, time.monotonic()
        seconds = now - window.since
        if not self.decides or seconds < _LOG_SECONDS:
            return
        if window.steps:
            logger.info(
                "Running %d, waiting %d; %.1f steps/s, %.1f samples and %.1f rows a step, "
                "admission wait %.2f s",
                len(self.running),
                len(self.waiting),
                window.steps / seconds,
                window.sample_steps / window.steps,
                window.rows / window.steps,
                window.admission_wait_s / max(1, window.admissions),
            )
        self.window = Window(since=now)


def find_stepwise_stage(stages: list) -> tuple[int, Any]:
    """Index and stage of the one that advances step by step, seen through a routing wrapper."""
    for index, stage in enumerate(stages):
        inner = getattr(stage, "standard_stage", stage)
        if isinstance(inner, StepwiseDenoisingMixin):
            return index, inner
    raise LookupError("the pipeline has no stepwise denoising stage")


def joins(item: Any) -> bool:
    """Whether an item is a request that can advance step by step beside others."""
    return isinstance(item, Req) and not (
        item.is_warmup
        or item.profile
        or item.realtime_session_id
        or item.extra.get("server_internal_prewarm")
    )


def label(item: Any) -> str:
    return f"request {item.request_id}" if isinstance(item, Req) else type(item).__name__


def request_id(item: Any) -> str | None:
    return item.request_id if isinstance(item, Req) else None

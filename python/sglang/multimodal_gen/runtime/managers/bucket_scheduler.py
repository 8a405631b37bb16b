# SPDX-License-Identifier: Apache-2.0
"""Step-level continuous batching: requests join and leave the running batch between steps.

`BucketScheduler` takes the place of the upstream scheduler's event loop and keeps using its
sockets, queues, handlers and worker. One turn of the loop: receive; decide, on rank 0 alone; send
the decision to the other ranks; act on it. A decision is one of: prepare the oldest waiting
request that is ready, run one step of some running samples, run one item upstream's way, or
nothing.
"""

import pickle
import time
from collections import deque
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
import zmq

from sglang.multimodal_gen.runtime.distributed.parallel_state import get_replica_group
from sglang.multimodal_gen.runtime.entrypoints.control_requests import (
    GetDisaggStatsReq,
    ListLorasReq,
)
from sglang.multimodal_gen.runtime.guidance.abort import AbortReq
from sglang.multimodal_gen.runtime.guidance.agreement import PlanMismatch, agree_on_plan
from sglang.multimodal_gen.runtime.guidance.metrics import LoopMetrics, finish_aborted
from sglang.multimodal_gen.runtime.guidance.plan import BucketPlan, SampleStep
from sglang.multimodal_gen.runtime.guidance.policy import Candidate, FairTurns
from sglang.multimodal_gen.runtime.guidance.running import (
    Admitted,
    Decision,
    Running,
    has_request_id,
    images_of,
    joins,
    label,
    requests_of,
)
from sglang.multimodal_gen.runtime.guidance.trace import ScheduleTrace
from sglang.multimodal_gen.runtime.managers.gpu_worker import _FatalDistributedForward
from sglang.multimodal_gen.runtime.managers.sample_runner import SampleRunner, failure
from sglang.multimodal_gen.runtime.managers.scheduler import Scheduler, _DeferredOutput
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch
from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.glm_image_prior import (  # noqa: E501
    Prior,
    assign_prior,
)
from sglang.multimodal_gen.runtime.utils.logging_utils import init_logger

logger = init_logger(__name__)

IDLE_SECONDS = 1.0  # a new request ends the wait
BUSY_SECONDS = 0.001  # something that no socket tells of is on its way
_PRIOR_SECONDS = 0.005  # little beside the time of an AR model, whose host this may be
_READING = (ListLorasReq, GetDisaggStatsReq, dict)  # a dict is a client's ping
_MAX_RECEIVE_ERRORS = 3  # in a row, as upstream


class BucketScheduler:
    """The loop. Every rank runs one; all see the same requests in the same order."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.worker = scheduler.worker
        self.server_args = scheduler.server_args
        self.runner = SampleRunner(scheduler)
        self.group = get_replica_group()
        self.alone = self.group.world_size == 1
        self.decides = self.group.rank_in_group == 0
        self.running: dict[int, Running] = {}
        self.turns = FairTurns()
        self.decided: Decision | None = None  # the last that was sent
        self.agreed: list[tuple[int, int]] | None = None  # what the ranks agreed to step next
        # of GLM-Image with an AR server; on the rank that decides
        self.fetcher = getattr(self.runner.stages_before[0], "prior_service", None)
        self.priors: dict[int, Future] = {}  # by id of the waiting request
        self.trace = self._open_trace() if self.decides else None
        self.metrics = LoopMetrics(scheduler.metrics) if self.decides else None
        self.admissions = 0
        self.may_prepare = True
        self.receive_errors = 0

    def _open_trace(self) -> ScheduleTrace | None:
        path = self.server_args.schedule_trace
        if path and self.server_args.dp_size > 1:
            path = f"{path}.{self.scheduler.dp_replica}"  # each replica plans alone
        return ScheduleTrace(path) if path else None

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
            if self.metrics is not None:
                self.metrics.observe(running=len(self.running), waiting=len(self.waiting))
        self.runner.close()
        for identity, item, _ in self.waiting:
            self._answer((identity, item), failure(item, "the server shuts down"))
        scheduler._drain_deferred_replies()
        if self.fetcher is not None:
            self.fetcher.close()
        if self.trace is not None:
            self.trace.close()
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
            # the other ranks of several still wait for what was to be received
            if not self.alone or self.receive_errors >= _MAX_RECEIVE_ERRORS:
                raise
            return
        for identity, item in received:
            if isinstance(item, AbortReq):
                self._abort(identity, item)
            else:
                self._enqueue(identity, item)

    def _enqueue(self, identity: bytes | None, item: Any) -> None:
        now = time.monotonic()
        self.waiting.append((identity, item, now))
        requests = requests_of(item)
        if self.scheduler.metrics is not None and requests:
            self.scheduler.metrics.enqueue(id(item), is_warmup=requests[0].is_warmup, now=now)
        if self.fetcher is not None and joins(item):
            self.priors[id(item)] = self.fetcher.fetch(requests)

    def _abort(self, identity: bytes | None, abort: AbortReq) -> None:
        """On every rank between the same two steps: requests arrive in the same order."""
        gone = f"Request {abort.request_id} was aborted: its client is gone"
        for entry in [e for e in self.waiting if has_request_id(e[1], abort.request_id)]:
            self.waiting.remove(entry)
            if (priors := self.priors.pop(id(entry[1]), None)) is not None:
                priors.cancel()
            self._count_aborted(entry[1], gone)
            self._answer(entry[:2], OutputBatch(error=gone))
        for running in list(self.running.values()):
            # one of a group takes the others along
            here = running.number in self.running
            if here and has_request_id(running.admitted.item, abort.request_id):
                self._count_aborted(running.admitted.item, gone)
                self._drop(running.admitted, OutputBatch(error=gone))
        self._answer((identity, abort), OutputBatch())

    def _count_aborted(self, item: Any, gone: str) -> None:
        """Before its answer, which would count an error."""
        if self.decides:
            logger.info(gone)
        if self.scheduler.metrics is not None:
            finish_aborted(self.scheduler.metrics, id(item))

    def _decide(self) -> Decision:
        candidates = [
            Candidate(
                sample_id=number,
                key=running.key,
                rows=running.sample.rows,
                arrival=number,
                most_rows=running.most_rows,
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
        running = sum(running.sample.images for running in self.running.values())
        free = self.server_args.max_running_samples - running
        for index, (_, item, _) in enumerate(self.waiting):
            if not joins(item):
                # what changes the weights waits for the running samples and holds the others back
                reads = requests_of(item) or isinstance(item, _READING)
                if reads or (index == 0 and not self.running):
                    return Decision(action="dispatch", waiting_index=index)
                return None
            priors = self.priors.get(id(item))
            if priors is not None and not priors.done():
                continue
            failed = priors is not None and priors.exception() is not None
            if self.running and images_of(item) > free and not failed:
                if free > 0:
                    return None  # what needs more room must not be overtaken for ever
                continue
            if priors is None:
                return Decision(action="prepare", waiting_index=index)
            del self.priors[id(item)]
            error = priors.exception()
            # plain text travels to the other ranks whatever the client raised
            written = priors.result() if error is None else RuntimeError(str(error))
            return Decision(action="prepare", waiting_index=index, priors=written)
        return None

    def _agree(self, decision: Decision | None) -> Decision:
        """Rank 0's decision, on every rank; one that it repeats is not sent again."""
        if self.alone:
            return decision
        payload = b""
        if self.decides and not (decision.repeatable and decision == self.decided):
            payload = pickle.dumps(decision)
        size = torch.tensor([len(payload)])
        source, group = self.group.ranks[0], self.group.cpu_group
        dist.broadcast(size, source, group=group)
        if size:
            words = torch.empty(int(size), dtype=torch.uint8)
            if self.decides:
                words = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            dist.broadcast(words, source, group=group)
            self.decided = decision if self.decides else pickle.loads(words.numpy().tobytes())
        return self.decided

    def _act(self, decision: Decision) -> None:
        # one preparation between two steps: it must not stall the samples that run
        self.may_prepare = decision.action in ("step", "idle")
        if decision.action == "prepare":
            self._prepare(*self._take(decision), decision.priors)
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
        self.runner.stage.forget_packed()
        if self.runner.decodes:
            self.scheduler._wait_idle(BUSY_SECONDS)
        elif self.priors:
            self.scheduler._wait_idle(_PRIOR_SECONDS)
        elif not self.waiting and self.runner.capture_graph():
            return  # one at a time: look for requests first
        elif self.alone and self.server_args.sleep_on_idle:
            self.scheduler._wait_idle(IDLE_SECONDS)
        if not (self.waiting or self.runner.decodes):
            self.worker.release_cache_if_idle()

    # --- actions --------------------------------------------------------------------------------

    def _prepare(
        self,
        identity: bytes | None,
        item: Any,
        arrived: float,
        priors: list[Prior] | Exception | None,
    ) -> None:
        """Run the stages before denoising; the request joins at the next step."""
        now = time.monotonic()
        admitted = Admitted(identity, item, now)
        if self.metrics is not None:
            self.metrics.admit(now - arrived)
        if self.scheduler.metrics is not None:
            self.scheduler.metrics.dispatch(id(item))
        try:
            if isinstance(priors, Exception):
                raise priors
            for req, prior in zip(admitted.requests, priors or ()):
                assign_prior(req, prior)
            if not (self.running or self.runner.decodes):
                self.runner.reset_peak_memory()
            samples = self.runner.prepare(admitted.requests, skip_stages=int(priors is not None))
        except Exception as error:
            if not isinstance(error, PlanMismatch):
                self.runner.agree_on_outcome(error)  # the other ranks may have come further
            self._drop(admitted, failure(item, error))
            return
        for index, sample in enumerate(samples):
            self.admissions += 1
            self.running[self.admissions] = Running(self.admissions, admitted, index, sample)
            self._span("prepare", self.admissions, now, request=sample.batch.request_id)

    def _step(self, group: list[Running]) -> None:
        start = time.monotonic()
        samples = [running.sample for running in group]
        before = [sample.step for sample in samples]
        rows = sum(sample.rows for sample in samples)
        traced = _plan_of(group).at(0) if self.trace is not None else ()
        try:
            self._agree_on_set(group)
        except PlanMismatch as error:
            if len(group) > 1:
                self._advance_one_by_one(group, before, rows)
            else:
                self._drop(group[0].admitted, failure(group[0].admitted.item, error))
        else:
            self._advance(group, before, rows)
        if self.metrics is not None:
            padded = self.runner.stage.padded_rows
            self.metrics.step(samples=len(group), rows=rows, padded=padded)
        if self.scheduler.metrics is not None:
            requests = len({running.admitted for running in group})
            self.scheduler.metrics.observe_batch(requests, "shared_step")
        self._trace_step(group, traced, start)
        for running in group:
            if running.number in self.running and running.sample.done:
                del self.running[running.number]
                self._finish(running)

    def _agree_on_set(self, group: list[Running]) -> None:
        """Ranks compare plans, and whether the step can begin, when the set of samples is another.

        Not at every step: nothing new is decided in between.
        """
        if self.alone:
            return
        expected = [(running.number, running.sample.step) for running in group]
        if self.agreed != expected:
            refusal = self.runner.check([running.sample for running in group])
            self.agreed = None
            acts_on = tuple(running.key for running in group)
            agree_on_plan(_plan_of(group), acts_on=acts_on, refusal=refusal)
        self.agreed = [(number, step + 1) for number, step in expected]

    def _advance(self, group: list[Running], before: list[int], rows: int) -> None:
        try:
            self._charge(self.runner.advance([r.sample for r in group], group[0].key))
            return
        except Exception as error:
            if not self.alone:
                # the other ranks may be inside this step's collectives
                raise _FatalDistributedForward(f"a step failed: {error!r}") from error
            logger.error("A step of %d samples failed: %s", len(group), error, exc_info=True)
        # only now, without the error, which holds the tensors of the failed step
        self._advance_one_by_one(group, before, rows)

    def _advance_one_by_one(self, group: list[Running], before: list[int], rows: int) -> None:
        """After a shared step that failed: only a sample that fails again gets the error."""
        self.agreed = None
        self.runner.drop_leftovers()
        for running, step in zip(group, before):
            if running.sample.step > step or running.number not in self.running:
                continue
            try:
                self._agree_on_set([running])
                self._charge(self.runner.advance([running.sample], running.key))
            except Exception as error:
                if not (self.alone or isinstance(error, PlanMismatch)):
                    raise _FatalDistributedForward(f"a step failed: {error!r}") from error
                self._drop(running.admitted, failure(running.admitted.item, error))
        if len(group) > 1 and all(running.number in self.running for running in group):
            # sharing is what failed, perhaps for want of memory: it would fail again at each step
            for running in group:
                running.row_limit = rows - 1

    def _charge(self, charges: list[tuple[Hashable, float]]) -> None:
        for key, seconds in charges:
            self.turns.charge(key, seconds)

    def _drop(self, admitted: Admitted, output: OutputBatch) -> None:
        """Answer an item that ends before its time; its samples give their rows back."""
        for running in list(self.running.values()):
            if running.admitted is admitted:
                del self.running[running.number]
        self.runner.stage.forget_packed()
        self._answer_once(admitted, output)

    def _finish(self, running: Running) -> None:
        start = time.monotonic()

        def answer(output: OutputBatch) -> None:
            self._answer_once(running.admitted, output)
            self._span("decode", running.number, start, request=running.sample.batch.request_id)

        try:
            self.runner.finish(running, answer)
        except Exception as error:
            self._drop(running.admitted, failure(running.admitted.item, error))

    def _dispatch(self, identity: bytes | None, item: Any, _arrived: float) -> None:
        """Run an item upstream's way, whole: control requests, warm-up, profiled requests."""
        scheduler = self.scheduler
        self.agreed = None
        self.runner.drain()
        if scheduler.metrics is not None:
            scheduler.metrics.dispatch(id(item))
            if requests_of(item):
                scheduler.metrics.observe_batch(1, "whole")
        try:
            output = scheduler._dispatch_single_request(item)
        except Exception as error:
            self._answer((identity, item), failure(item, error))
            return
        if isinstance(output, _DeferredOutput):
            scheduler._submit_deferred_reply(item=(identity, item), deferred=output)
        elif isinstance(output, OutputBatch):
            self._answer((identity, item), output)
        else:
            try:
                scheduler._return_results_sequentially([(identity, item)], output.outputs)
            except zmq.ZMQError as error:
                logger.error("ZMQ error sending replies: %s", error)

    # --- answers and trace ----------------------------------------------------------------------

    def _answer_once(self, admitted: Admitted, output: OutputBatch) -> None:
        if admitted.claim_answer():
            self._answer((admitted.identity, admitted.item), output)

    def _answer(self, item: tuple[bytes | None, Any], output: OutputBatch) -> None:
        """From any thread; must not raise."""
        try:
            self.scheduler._return_item_result(item, output)
        except zmq.ZMQError as error:
            logger.error("ZMQ error sending reply: %s", error)
        except Exception as error:  # such as a full disk that the picture was to cross
            logger.error("Sending the answer of %s failed", label(item[1]), exc_info=True)
            if output.error is None:
                self._answer(item, OutputBatch(error=f"The answer could not be sent: {error}"))

    def _span(self, name: str, lane: int, start: float, **args: Any) -> None:
        if self.trace is not None:
            self.trace.span(name, lane, start, time.monotonic(), **args)

    def _trace_step(
        self, group: list[Running], steps: Sequence[SampleStep], start: float
    ) -> None:
        if self.trace is None:
            return
        self._span("step", 0, start, samples=len(steps), rows=sum(step.rows for step in steps))
        for running, step in zip(group, steps):
            name = f"bucket {step.bucket}"
            args = dict(step=step.step, scale=step.scale, rows=step.rows)
            self._span(name, running.number, start, **args)


def _plan_of(group: list[Running]) -> BucketPlan:
    return BucketPlan(samples=tuple(running.planned() for running in group))

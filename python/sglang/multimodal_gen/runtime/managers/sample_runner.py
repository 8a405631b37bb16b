# SPDX-License-Identifier: Apache-2.0
"""The engine side of continuous batching: one rank prepares, steps and decodes samples."""

import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from sglang.multimodal_gen import envs
from sglang.multimodal_gen.runtime.bucket_cuda_graph import publish_graphs
from sglang.multimodal_gen.runtime.distributed.device_communicators.ipc_a2a import IPC_A2A
from sglang.multimodal_gen.runtime.distributed.device_communicators.ipc_a2a_multi import (
    IPC_A2A_MULTI,
)
from sglang.multimodal_gen.runtime.distributed.parallel_state import get_replica_group
from sglang.multimodal_gen.runtime.guidance.agreement import (
    AGREE_SECONDS,
    PlanMismatch,
    RanksLost,
    agree_on_plan,
)
from sglang.multimodal_gen.runtime.guidance.plan import BucketPlan
from sglang.multimodal_gen.runtime.guidance.running import Admitted, Running, label
from sglang.multimodal_gen.runtime.guidance.support import unrouted
from sglang.multimodal_gen.runtime.managers.gpu_worker import (
    OOM_MSG,
    _FatalDistributedForward,
)
from sglang.multimodal_gen.runtime.managers.progress_reporter import get_progress_reporter
from sglang.multimodal_gen.runtime.managers.request_gc import request_gc
from sglang.multimodal_gen.runtime.managers.scheduler import Scheduler
from sglang.multimodal_gen.runtime.observability.metrics import get_metrics
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch, Req
from sglang.multimodal_gen.runtime.pipelines_core.stages.base import StageParallelismType
from sglang.multimodal_gen.runtime.pipelines_core.stages.stepwise_denoising import (
    RunningSample,
    StepwiseDenoisingMixin,
)
from sglang.multimodal_gen.runtime.platforms import current_platform
from sglang.multimodal_gen.runtime.server_args.server_args import RESIDENT
from sglang.multimodal_gen.runtime.utils.logging_utils import init_logger
from sglang.multimodal_gen.runtime.utils.perf_logger import capture_memory_snapshot

logger = init_logger(__name__)

_MAX_STEPS_AHEAD = 1  # launched while an older step still runs: more would keep newcomers waiting

_MAIN_RANK_ONLY = StageParallelismType.MAIN_RANK_ONLY

Answer = Callable[[OutputBatch], None]


class SampleRunner:
    """Runs a pipeline's stages apart: those before denoising, single steps, those after it."""

    def __init__(self, scheduler: Scheduler):
        self.worker = scheduler.worker
        self.server_args = scheduler.server_args
        self.pipeline = self.worker.pipeline
        index, self.stage = find_stepwise_stage(self.pipeline.stages)
        self.stages_before = self.pipeline.stages[:index]
        self.stages_after = self.pipeline.stages[index + 1 :]
        self.alone = get_replica_group().world_size == 1
        self.decodes: Any = scheduler._inflight_finalizes  # upstream waits for these when idle
        self._decoder = ThreadPoolExecutor(1, thread_name_prefix="sgl-diffusion-decode")
        self._decodes_beside = self.alone and self._all_resident()
        self._stream = None if current_platform.is_cpu() else torch.get_device_module().Stream()
        self._steps_in_flight: deque = deque()

    def _all_resident(self) -> bool:
        """Whether the loop may go on while another thread decodes: nothing is moved for either."""
        return all(
            self.server_args.residency_mode(use.component_name) == RESIDENT
            for stage in self.stages_after
            for use in stage.component_uses(self.server_args)
        )

    # --- before denoising -----------------------------------------------------------------------

    def prepare(self, requests: list[Req], skip_stages: int = 0) -> list[RunningSample]:
        """Run the stages before denoising, of a group together; its samples join at the next step.

        Raises:
            PlanMismatch: on every rank alike.
            Exception: from a stage, perhaps on this rank alone.
        """
        if self.worker.is_sleeping():
            raise RuntimeError("Server is sleeping. Call resume_memory_occupation first.")
        # as upstream at each request: an exchange that timed out has left incomplete data
        IPC_A2A.check_timeout()
        IPC_A2A_MULTI.check_timeout()
        request_gc.collect_after_warmup()
        if len(requests) > 1:
            self.worker._validate_group_forward_reqs(requests)
        self.worker._release_warmup_pool(requests[0])
        self._record_memory("before_forward", [req.metrics for req in requests])
        for req in requests:
            req.log(server_args=self.server_args)
            _report_start(req)
        if any(req.image_path for req in requests):
            self.drain()  # encoding a source image and decoding use the same VAE
        stages = self.stages_before[skip_stages:]
        if len(requests) == 1:
            prepared = [self._run_stages(stages, requests[0])]
        else:
            prepared = self._run_stages(stages, requests, grouped=True)
        samples = []
        for req in prepared:
            with self._inside_stage(req):
                samples.append(self.stage.start_sample(req, self.server_args))
        return samples

    def reset_peak_memory(self) -> None:
        """Where nothing runs: the device has one peak, whatever runs side by side."""
        if not (current_platform.is_cpu() or current_platform.is_mps()):
            torch.get_device_module().reset_peak_memory_stats()

    def _record_memory(self, name: str, metrics: list[Any]) -> None:
        if self.worker.is_output_rank and not current_platform.is_cpu():
            snapshot = capture_memory_snapshot()
            for one in metrics:
                if one is not None:
                    one.record_memory_snapshot(name, snapshot)

    # --- denoising ------------------------------------------------------------------------------

    def check(self, samples: list[RunningSample]) -> str | None:
        """Why these samples' next step cannot begin; None where it can."""
        try:
            with self._inside_stage(samples[0].batch):
                self.stage.prepare_step(samples, self.server_args)
        except Exception as error:
            logger.error("A step of %d samples cannot begin", len(samples), exc_info=True)
            return repr(error)
        return None

    def advance(self, samples: list[RunningSample], key: Hashable) -> list[tuple[Hashable, float]]:
        """One step of each, in one forward. Raises what the forward raises.

        Returns:
            Seconds to charge, by key. A device runs a step while the next one is launched, so the
            launch is charged to `key` and the wait for the device to the key of the step before.
        """
        start = time.monotonic()
        with self._inside_stage(samples[0].batch):
            self.stage.step_samples(samples, self.server_args)
        charges = [(key, time.monotonic() - start), *self._bound_steps_in_flight(key)]
        seconds = time.monotonic() - start
        for sample in samples:
            if _is_measured(sample.batch):
                sample.batch.metrics.record_step(seconds)
        return charges

    def _bound_steps_in_flight(self, key: Hashable) -> list[tuple[Hashable, float]]:
        """Wait for the step before the last one: the device stays busy, and the loop with it."""
        if self._stream is None:
            return []
        event = torch.get_device_module().Event()
        event.record()
        self._steps_in_flight.append((event, key))
        charges = []
        while len(self._steps_in_flight) > _MAX_STEPS_AHEAD:
            start = time.monotonic()
            older, older_key = self._steps_in_flight.popleft()
            older.synchronize()
            charges.append((older_key, time.monotonic() - start))
        return charges

    def drop_leftovers(self) -> None:
        """Of a step that failed, perhaps for want of memory."""
        self.stage.forget_packed()
        if not current_platform.is_cpu():
            torch.get_device_module().empty_cache()

    def capture_graph(self) -> bool:
        """At an idle moment: capture the bucket that most of the traffic misses, if any."""
        graphs = self.stage.graphs
        if graphs is None or self.worker.is_sleeping() or not graphs.capture_next():
            return False
        publish_graphs(graphs)
        return True

    # --- after denoising ------------------------------------------------------------------------

    def finish(self, running: Running, answer: Answer) -> None:
        """Decode, save and answer, beside the loop where nothing forbids it.

        `answer` is called once, by whichever thread is done last.
        """
        req = running.sample.batch
        with self._inside_stage(req):
            self.stage.finish_sample(running.sample, self.server_args)
        _record_denoising(self.stage, running.sample)
        # as many as may run; beyond that decoding is the bottleneck, and what waits takes memory
        while len(self.decodes) >= self.server_args.max_running_samples:
            self.decodes.popleft().result()
        if self._decodes_beside and not _is_measured(req):
            self._finish_beside(running, answer)
        else:
            self.drain()  # the VAE decodes one picture at a time
            self._finish_here(running, answer)

    def _finish_beside(self, running: Running, answer: Answer) -> None:
        ready = None
        if self._stream is not None:
            ready = torch.get_device_module().Event()
            ready.record()
        self.decodes.append(self._decoder.submit(self._decode, running, ready, answer))

    @request_gc.defer()
    def _decode(self, running: Running, ready: Any, answer: Answer) -> None:
        """On the decoding thread, on a stream of its own; must not raise."""
        req, admitted = running.sample.batch, running.admitted
        try:
            with self._on_stream(ready), current_platform.inference_mode(), torch.no_grad():
                result = req
                for stage in self.stages_after:
                    # everything is resident: the manager belongs to the loop's thread
                    stage.set_component_residency_manager(None)
                    result = stage(result, self.server_args)
                output = self.worker._to_output_batch(result)
                del result
                output = self._complete(admitted, running.index, output)
                if output is not None:
                    arguments = self._measured(admitted, output)
                    self.worker._finalize_output_batch(**arguments, deferred=True)
        except Exception as error:
            output = failure(admitted.item, error)
        if output is not None:
            answer(output)

    @contextmanager
    def _on_stream(self, ready: Any):
        if self._stream is None:
            yield
            return
        device_module = torch.get_device_module()
        with device_module.device(self.worker.local_rank), device_module.stream(self._stream):
            self._stream.wait_event(ready)
            yield
            self._stream.synchronize()

    def _measured(self, admitted: Admitted, output: OutputBatch) -> dict[str, Any]:
        """What upstream's finalizing takes, at the end of the forward."""
        metrics = self.worker._iter_output_metrics(output)
        self._record_memory("after_forward", metrics)
        for one in metrics:
            one.total_duration_ms = (time.monotonic() - admitted.start_time) * 1000
        return dict(
            output_batch=output,
            req=admitted.requests[0],
            save_output_paths=self._saver(admitted),
            output_metrics=metrics,
        )

    def _finish_here(self, running: Running, answer: Answer) -> None:
        """On the loop's thread: decoding runs collectives, or what it needs is moved for it."""
        admitted = running.admitted
        result, error = running.sample.batch, None
        try:
            for stage in self.stages_after:
                result = self._run_stages([stage], result)
        except Exception as raised:
            error = raised
            if stage.parallelism_type_for(running.sample.batch) == _MAIN_RANK_ONLY:
                torch.distributed.barrier()  # the other ranks wait there for this one
        self.agree_on_outcome(error)
        if error is not None:
            answer(failure(admitted.item, error))
            return
        output = self.worker._to_output_batch(result)
        output = self._complete(admitted, running.index, output)
        if output is None:
            return
        # not by the worker's own forward, which would reset the peak memory here
        arguments = self._measured(admitted, output)
        if not current_platform.is_cpu() and self.worker._can_defer_finalize(admitted.requests[0]):
            done = torch.get_device_module().Event()
            done.record()
            finalize = partial(self.worker._finalize_deferred, **arguments, done_event=done)
            self.decodes.append(self._decoder.submit(_finalize_deferred, finalize, output, answer))
            return
        try:
            self.worker._finalize_output_batch(**arguments, deferred=False)
        except Exception as raised:
            output = failure(admitted.item, raised)
        answer(output)

    def agree_on_outcome(self, error: Exception | None) -> None:
        """All ranks go on together after stages that may have failed on one alone.

        A rank that failed before it could agree on a request's plan meets the others there.
        """
        if self.alone:
            return
        refusal = None if error is None else repr(error)
        timeout_s = None if error is None else AGREE_SECONDS
        try:
            agree_on_plan(BucketPlan(samples=()), refusal=refusal, timeout_s=timeout_s)
        except PlanMismatch:
            if error is None:
                raise
        except RanksLost as lost:
            raise _FatalDistributedForward(str(lost)) from error

    def _complete(self, admitted: Admitted, index: int, output: OutputBatch) -> OutputBatch | None:
        """The output of the whole item, if this was the last of its requests."""
        admitted.outputs[index] = output
        if any(one is None for one in admitted.outputs):
            return None
        if len(admitted.outputs) == 1:
            return output
        return self.worker._merge_expanded_output_batches(admitted.outputs)

    def _saver(self, admitted: Admitted) -> Callable[[OutputBatch], None]:
        requests = admitted.requests
        if len(requests) > 1:
            return partial(self.worker._save_group_output_paths, requests)
        return partial(self.worker._save_output_paths, requests[0])

    def drain(self) -> None:
        """Wait until nothing is decoded beside the loop."""
        while self.decodes:
            future: Future = self.decodes.popleft()
            future.result()

    def close(self) -> None:
        self.drain()
        self._decoder.shutdown()

    # --- pieces ---------------------------------------------------------------------------------

    def _run_stages(self, stages: list, payload: Any, *, grouped: bool = False) -> Any:
        self.pipeline._install_component_residency_manager(self.server_args)
        executor = self.pipeline.executor
        execute = executor.execute_group if grouped else executor.execute
        with current_platform.inference_mode(), torch.no_grad():
            return execute(stages, payload, self.server_args)

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


def find_stepwise_stage(stages: list) -> tuple[int, Any]:
    """Index and stage of the one that advances step by step."""
    for index, stage in enumerate(map(unrouted, stages)):
        if isinstance(stage, StepwiseDenoisingMixin):
            return index, stage
    raise LookupError("the pipeline has no stepwise denoising stage")


def failure(item: Any, error: Exception | str) -> OutputBatch:
    """The answer to an item that failed; the error is logged here."""
    raised = error if isinstance(error, Exception) else None
    logger.error("Error executing %s: %s", label(item), error, exc_info=raised)
    if isinstance(error, torch.OutOfMemoryError):
        logger.warning(OOM_MSG)
    # what a stage of the first rank alone raised is the cause of what every rank raises
    cause = f": {raised.__cause__}" if raised is not None and raised.__cause__ else ""
    return OutputBatch(error=f"Error executing {label(item)}: {error}{cause}")


def _report_start(req: Req) -> None:
    reporter = get_progress_reporter()
    if reporter is not None and req.report_progress:
        reporter.start(request_ids=req.client_request_ids())


def _is_measured(req: Req) -> bool:
    """Whether somebody reads the request's timings; upstream measures such requests on the loop."""
    return req.perf_dump_path is not None or envs.SGLANG_DIFFUSION_STAGE_LOGGING


def _record_denoising(stage: StepwiseDenoisingMixin, sample: RunningSample) -> None:
    """What upstream's profiler would record around the stage: here its parts are apart."""
    name = stage._active_profile_stage_name()
    seconds = time.monotonic() - sample.started
    if (metrics := get_metrics()) is not None:
        metrics.observe_stage(name, seconds)
    sample.batch.metrics.denoising_stages.add(name)
    if _is_measured(sample.batch):
        sample.batch.metrics.record_stage(name, seconds)


def _finalize_deferred(finalize: Callable[[], None], output: OutputBatch, answer: Answer) -> None:
    try:
        finalize()
    except Exception as error:
        logger.error("Saving failed", exc_info=True)
        output = OutputBatch(error=f"Saving failed: {error}")
    answer(output)

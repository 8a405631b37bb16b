# SPDX-License-Identifier: Apache-2.0
"""Continuous batching in a GLM-Image denoiser: requests come from the head, with prior tokens."""

import queue
from typing import Any

from sglang.multimodal_gen.runtime.disaggregation.scheduler_mixin import (
    _expand_glm_distributed_outputs,
)
from sglang.multimodal_gen.runtime.disaggregation.transport.codec import (
    send_tensors,
    unpack_tensors,
)
from sglang.multimodal_gen.runtime.managers.bucket_scheduler import (
    BUSY_SECONDS,
    IDLE_SECONDS,
    BucketScheduler,
)
from sglang.multimodal_gen.runtime.managers.scheduler import Scheduler
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch, Req
from sglang.multimodal_gen.runtime.platforms import current_platform
from sglang.multimodal_gen.runtime.utils.logging_utils import init_logger

logger = init_logger(__name__)


class BucketDenoiser(BucketScheduler):
    """The same loop with another way in and out: frames from the head, pictures back to it."""

    def __init__(self, scheduler: Scheduler):
        super().__init__(scheduler)
        self.fetcher = None  # the head asks the AR server
        self._arrived: list[list[bytes]] = []

    def _receive(self) -> None:
        requests = self._build_arrived() if self.decides else []
        if not self.alone:
            (count,) = self.scheduler._broadcast_to_all_ranks([len(requests)])
            requests = requests or [None] * count
            requests = [self.scheduler._broadcast_req_to_all_ranks(req) for req in requests]
        for req in requests:
            # the head saves and encodes; pixels go back to it
            req.save_output = False
            req.return_file_paths_only = False
            try:
                outputs = _expand(req)
            except Exception as error:
                logger.error("Request %s has no outputs", req.request_id, exc_info=True)
                self._refuse(req.request_id, error)
                continue
            identity = req.request_id.encode()
            self._enqueue(identity, outputs if len(outputs) > 1 else outputs[0])

    def _take_frames(self) -> list[list[bytes]]:
        frames, self._arrived = self._arrived, []
        while True:
            try:
                frames.append(self.scheduler._compute_ready_queue.get_nowait()[1])
            except queue.Empty:
                return frames

    def _build_arrived(self) -> list[Req]:
        device = f"{current_platform.device_type}:{self.worker.local_rank}"
        requests = []
        for frames in self._take_frames():
            fields = {}
            try:
                tensors, fields = unpack_tensors(frames, device=device)
                request_id = fields.get("request_id")
                requests.append(self.scheduler._build_disagg_req(fields, tensors))
            except Exception as error:
                logger.error("A request of the head cannot be read", exc_info=True)
                if fields:
                    self._refuse(request_id, error)
        return requests

    def _refuse(self, request_id: str, error: Exception) -> None:
        if self.decides:
            self._send({}, {"request_id": request_id, "error": str(error)})

    def _wait(self) -> None:
        self.runner.stage.forget_packed()
        work = self.scheduler._compute_ready_queue if self.decides else None
        if self.decides and work.empty() and not self.runner.decodes:
            if self.runner.capture_graph():
                return  # one at a time: look for requests first
        if self.decides:
            seconds = BUSY_SECONDS if self.runner.decodes else IDLE_SECONDS
            try:
                self._arrived.append(work.get(timeout=seconds)[1])
            except queue.Empty:
                pass
        self.worker.release_cache_if_idle()

    def _answer(self, item: tuple[bytes | None, Any], output: OutputBatch) -> None:
        """From any thread."""
        identity, work = item
        if self.scheduler.metrics is not None:
            self.scheduler.metrics.finish(id(work), error=output.error is not None)
        if not self.decides:
            return
        tensors = {} if output.output is None else {"output": output.output}
        fields = {
            "request_id": identity.decode(),
            "error": output.error,
            "usage": output.usage,
            "metrics": output.metrics and output.metrics.to_dict(),
            "metrics_list": output.metrics_list
            and [one and one.to_dict() for one in output.metrics_list],
            "peak_memory_mb": output.peak_memory_mb,
        }
        self._send(tensors, {name: value for name, value in fields.items() if value is not None})
        record = self.scheduler._disagg_metrics
        done = record.record_request_failed if output.error else record.record_request_complete
        done(fields["request_id"])

    def _send(self, tensors: dict[str, Any], fields: dict[str, Any]) -> None:
        with self.scheduler._socket_lock:
            send_tensors(self.scheduler._pool_result_push, tensors, fields)


def _expand(req: Req) -> list[Req]:
    """One request for each of its images; upstream makes each anew from its sampling params."""
    outputs = _expand_glm_distributed_outputs(req)
    for output in outputs:
        output.do_classifier_free_guidance = req.do_classifier_free_guidance
        output.metrics.warnings = getattr(req.metrics, "warnings", None)
    return outputs

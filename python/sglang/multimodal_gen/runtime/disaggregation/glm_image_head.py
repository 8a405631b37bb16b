# SPDX-License-Identifier: Apache-2.0
"""The head of GLM-Image's disaggregated topology: each request goes its own way.

Upstream's head has one batch at the AR server, of one resolution, and an error fails all of it.
Here each request is asked for when it comes, and is sent to a denoiser when its tokens are there.
"""

import pickle
import time
from concurrent.futures import Future
from typing import Any

import zmq
from transformers import PretrainedConfig

from sglang.multimodal_gen.configs.glm_image_prior import prior_config
from sglang.multimodal_gen.runtime.disaggregation.orchestrator import (
    DiffusionServer,
    _GlmDistributedRequest,
)
from sglang.multimodal_gen.runtime.disaggregation.request_state import RequestState
from sglang.multimodal_gen.runtime.guidance.abort import AbortReq
from sglang.multimodal_gen.runtime.observability.metrics import get_metrics
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch
from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.glm_image_prior import (  # noqa: E501
    assign_prior,
    build_service,
    sampling_of,
    wait_for_server,
)
from sglang.multimodal_gen.runtime.utils.logging_utils import init_logger

logger = init_logger(__name__)


class GlmImageHead(DiffusionServer):
    """Waits for the AR server, then routes requests between it and the denoisers.

    Raises:
        ARServerUnfit: at construction.
    """

    def __init__(self, *args: Any, server_args: Any, **kwargs: Any):
        super().__init__(*args, server_args=server_args, **kwargs)
        config = prior_config(server_args)
        wait_for_server(config)
        transformer, _ = PretrainedConfig.get_config_dict(
            server_args.model_path, subfolder="transformer"
        )
        self._service = build_service(
            config,
            processor=self._glm_distributed_state.ar_stage.processor,
            codebook=transformer["prior_vq_quantizer_codebook_size"],
            sampling=sampling_of(server_args.model_path),
            server_metrics=get_metrics(),
        )
        self._asked: dict[str, tuple[_GlmDistributedRequest, Future]] = {}
        # what one denoiser works on at a time
        self._capacity = max(1, getattr(server_args, "max_running_samples", 0))
        self._denoiser_free_slots[:] = [self._capacity] * self._num_denoisers

    def stop(self) -> None:
        super().stop()
        self._service.close()

    # --- clients --------------------------------------------------------------------------------

    def _handle_client_request(self, frontend: zmq.Socket) -> None:
        try:
            parts = frontend.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        try:
            item = pickle.loads(parts[-1])
        except Exception:  # upstream says what is wrong with it
            item = None
        item = item[0] if isinstance(item, list) and item else item
        if isinstance(item, AbortReq):
            self._abort(item.request_id)
            frontend.send_multipart([parts[0], b"", pickle.dumps(OutputBatch())])
        else:
            super()._handle_client_request(_Received(frontend, parts))

    def _abort(self, request_id: str) -> None:
        """A client is gone. What a denoiser works on already is finished."""
        state = self._glm_distributed_state
        if request_id in self._asked:
            self._asked.pop(request_id)[1].cancel()
        elif request := state.denoiser_requests.get(request_id):
            if request not in state.pending_denoiser_requests:
                return
            state.pending_denoiser_requests.remove(request)
            del state.denoiser_requests[request_id]
        else:
            return
        self._complete_with_error(request_id, "aborted: its client is gone")

    # --- tokens ---------------------------------------------------------------------------------

    def _dispatch_glm_ar_batch_if_ready(self) -> None:
        """Ask for every request that waits."""
        waiting = self._glm_distributed_state.pending_ar_requests
        while waiting:
            request = waiting.popleft()
            self._pass_on(request, RequestState.ENCODER_RUNNING)
            future = self._service.fetch([request.req])
            self._asked[request.client_request_id] = (request, future)

    def _process_glm_ar_batch_result_if_ready(self) -> None:
        """Hand requests whose tokens are there to the denoisers."""
        for request_id, (request, future) in list(self._asked.items()):
            if self._tracker.get(request_id) is None:  # it ran out of time
                future.cancel()
            if not future.done():
                continue
            del self._asked[request_id]
            if future.cancelled():
                continue
            if (error := future.exception()) is not None:
                self._complete_with_error(request_id, str(error))
                continue
            (prior,) = future.result()
            assign_prior(request.req, prior)
            self._pass_on(request, RequestState.ENCODER_DONE)
            self._pass_on(request, RequestState.DENOISING_WAITING)
            state = self._glm_distributed_state
            state.denoiser_requests[request.req.request_id] = request
            state.pending_denoiser_requests.append(request)
            logger.info(
                "Tokens of %s after %.2f s; %d more at the AR server",
                request_id,
                time.monotonic() - request.enqueue_time,
                len(self._asked),
            )

    def _pass_on(self, request: _GlmDistributedRequest, state: RequestState) -> None:
        if self._tracker.get(request.client_request_id) is not None:
            self._tracker.transition(request.client_request_id, state)

    # --- denoisers ------------------------------------------------------------------------------

    def _handle_glm_denoiser_monitor_event(self, worker_idx: int, monitor: Any) -> None:
        super()._handle_glm_denoiser_monitor_event(worker_idx, monitor)
        self._count_free_slots()

    def _handle_glm_denoiser_result(self, tensor_fields: dict, scalar_fields: dict) -> None:
        super()._handle_glm_denoiser_result(tensor_fields, scalar_fields)
        self._count_free_slots()

    def _count_free_slots(self) -> None:
        """Upstream writes 1 where a denoiser is free; ours may take more."""
        state = self._glm_distributed_state
        busy = [request.worker_idx for request in state.denoiser_requests.values()]
        for index, available in enumerate(state.denoiser_worker_available):
            free = self._capacity - busy.count(index)
            self._denoiser_free_slots[index] = free if available else 0

    def get_stats(self) -> dict:
        return super().get_stats() | {"glm_ar_in_flight": len(self._asked)}


class _Received:
    """A socket whose next message was taken already."""

    def __init__(self, socket: zmq.Socket, parts: list[bytes]):
        self._parts = parts
        self.send_multipart = socket.send_multipart

    def recv_multipart(self, *_flags: int) -> list[bytes]:
        return self._parts

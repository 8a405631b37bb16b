"""A real worker with its loaded pipeline, in this process: for tests of what is inside a step."""

import os
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from harness.processes import PROBE, free_ports


class Worker:
    """What SGLang's scheduler process holds, without its sockets. One at a time in a process."""

    def __init__(self, model: Path, *, priors: Path | None = None, **server_kwargs: Any):
        """
        Args:
            priors: a directory where GLM-Image's prior is kept for each prompt, size and seed.
        """
        self._environ = dict(os.environ)  # the worker sets ranks and ports there
        os.environ.setdefault("SGLANG_PERF_LOG_DIR", "")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        if priors is not None:
            os.environ["PROBE_KEEP_PRIOR"] = str(priors)
            sys.path.insert(0, str(PROBE))
        from sglang.multimodal_gen.runtime.platforms import (
            current_platform,
            initialize_current_platform,
        )

        initialize_current_platform()
        from sglang.multimodal_gen.runtime.platforms.plugins import (
            apply_plugin_hooks,
            load_plugins,
        )

        load_plugins()
        apply_plugin_hooks()
        from sglang.multimodal_gen.runtime.managers.cpu_worker import CPUWorker
        from sglang.multimodal_gen.runtime.managers.gpu_worker import GPUWorker
        from sglang.multimodal_gen.runtime.managers.sample_runner import SampleRunner
        from sglang.multimodal_gen.runtime.server_args import (
            ServerArgs,
            set_global_server_args,
        )

        scheduler_port, master_port = free_ports(2)
        self.server_args = ServerArgs.from_kwargs(
            model_path=str(model),
            scheduler_port=scheduler_port,
            master_port=master_port,
            **server_kwargs,
        )
        set_global_server_args(self.server_args)
        worker_class = CPUWorker if current_platform.is_cpu() else GPUWorker
        self.worker = worker_class(
            local_rank=0, rank=0, master_port=master_port, server_args=self.server_args
        )
        self.runner = SampleRunner(
            SimpleNamespace(
                worker=self.worker, server_args=self.server_args, _inflight_finalizes=deque()
            )
        )
        self.stage = self.runner.stage

    def request(self, **fields: Any):
        """A request with its plan, as it arrives at the loop."""
        from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
        from sglang.multimodal_gen.runtime.entrypoints import utils
        from sglang.multimodal_gen.runtime.guidance.requests import attach_plan

        fields = {"prompt": "a cat", "width": 64, "height": 64, "seed": 7, **fields}
        sampling_params = SamplingParams.from_user_sampling_params_args(
            self.server_args.model_path, server_args=self.server_args, **fields
        )
        request = utils.prepare_request(self.server_args, sampling_params)
        attach_plan(request, self.server_args)
        return request

    def prepare(self, **fields: Any):
        """A sample before its first step."""
        (sample,) = self.runner.prepare([self.request(**fields)])
        return sample

    def denoise(self, *requests: dict[str, Any]) -> list:
        """Final latents of requests; those that may share a forward advance together."""
        samples = [self.prepare(**fields) for fields in requests]
        while running := [sample for sample in samples if not sample.done]:
            groups: dict[Any, list] = {}
            for sample in running:
                groups.setdefault(sample.share_key or sample.run.serial, []).append(sample)
            for group in groups.values():
                self.runner.advance(group, key=None)
        return [sample.ctx.latents.clone() for sample in samples]

    def loop(self, metrics: Any = None):
        """A step loop around this worker, without sockets; its `answers` are by identity."""
        from sglang.multimodal_gen.runtime.managers.bucket_scheduler import BucketScheduler
        from sglang.multimodal_gen.runtime.managers.scheduler import Scheduler

        scheduler = Scheduler.__new__(Scheduler)
        scheduler.worker, scheduler.server_args = self.worker, self.server_args
        scheduler.metrics, scheduler.waiting_queue = metrics, deque()
        scheduler._inflight_finalizes = deque()
        scheduler._req_based_warmup_failed = False
        scheduler.return_result = lambda output, identity, **_: answers.update({identity: output})
        loop = BucketScheduler(scheduler)
        answers = loop.answers = {}
        return loop

    def set_lora(self, nickname: str, path: Path) -> bool:
        """A LoRA request as the scheduler's process handles one; whether it failed."""
        from sglang.multimodal_gen.runtime.entrypoints.control_requests import SetLoraReq
        from sglang.multimodal_gen.runtime.managers.scheduler import Scheduler

        scheduler = Scheduler.__new__(Scheduler)
        scheduler.worker, scheduler.server_args = self.worker, self.server_args
        scheduler.request_handlers = {SetLoraReq: scheduler._handle_set_lora}
        try:
            scheduler._dispatch_single_request(SetLoraReq(nickname, str(path)))
        except Exception:
            return True
        return False

    def close(self) -> None:
        from sglang.multimodal_gen.runtime.distributed.parallel_state import (
            cleanup_dist_env_and_memory,
        )

        self.runner.close()
        self.stage = self.runner = self.worker = None
        cleanup_dist_env_and_memory()
        os.environ.clear()
        os.environ.update(self._environ)


def write_lora(worker: Worker, directory: Path) -> Path:
    """A random LoRA of rank 2 for one projection of GLM-Image's first block."""
    import torch
    from safetensors.torch import save_file

    weight = worker.stage.transformer.transformer_blocks[0].attn1.to_v.weight
    out, width = weight.shape
    generator = torch.Generator().manual_seed(0)
    name = "transformer_blocks.0.attn1.to_v"
    path = directory / "pytorch_lora_weights.safetensors"
    save_file(
        {
            f"{name}.lora_A.weight": torch.randn(2, width, generator=generator),
            f"{name}.lora_B.weight": torch.randn(out, 2, generator=generator),
        },
        path,
    )
    return path

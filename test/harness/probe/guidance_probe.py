"""A plugin for tests: records what the model computed, or spoils a plan on one rank.

Settings in the environment:
    PROBE_RECORD: a directory; every prediction of a branch and every prior is saved there.
    PROBE_SPOIL_RANK, PROBE_SPOIL_SCALE: that rank alters each plan that holds that scale.
    PROBE_KEEP_PRIOR: a directory; GLM-Image's prior is written there once for each prompt, size
        and seed, for every engine with this setting.
    PROBE_FP32: comma-separated parts that compute in fp32: timestep, attention.
    PROBE_NO_SYNC: a step of a request whose prompt says "no sync" raises where it syncs the device.
    PROBE_FAIL: requests whose prompt says "fail in prepare", "row" or "decode" fail there; those
        that go on "on rank 1" fail on that rank alone. Where it says "fail when shared", every step
        of more than one sample fails.
    PROBE_SLOW: each step of requests whose prompt says "slow step" takes `SLOW_SECONDS` longer.
    PROBE_HOLD: a file; requests whose prompt says "held decode" wait there until it exists.
    PROBE_SWAP: requests whose prompt says "swapped halves" get uncond for cond and cond for
        uncond from packed forwards.
    PROBE_BREAK_HOOK: hooks on a target that ends so cannot be applied, as if upstream had moved it.
"""

import hashlib
import itertools
import os
import time
from dataclasses import replace
from pathlib import Path

_calls = itertools.count()
SLOW_SECONDS = 0.4


def register() -> None:
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

    if "PROBE_BREAK_HOOK" in os.environ:
        apply_target = HookRegistry._apply_target

        def apply_unless_broken(target, hooks):
            if target.endswith(os.environ["PROBE_BREAK_HOOK"]):
                raise AttributeError(target)
            apply_target(target, hooks)

        HookRegistry._apply_target = staticmethod(apply_unless_broken)
    stages = "sglang.multimodal_gen.runtime.pipelines_core.stages"
    if "PROBE_RECORD" in os.environ:
        HookRegistry.register(
            f"{stages}.denoising.DenoisingStage._predict_noise", record_noise, HookType.AFTER
        )
        HookRegistry.register(
            f"{stages}.model_specific_stages.glm_image.GlmImageAR.forward",
            record_prior,
            HookType.AFTER,
        )
    glm_image = f"{stages}.model_specific_stages.glm_image"
    models = "sglang.multimodal_gen.runtime"
    if "PROBE_KEEP_PRIOR" in os.environ:
        HookRegistry.register(
            f"{glm_image}.GlmImageAR.generate_prior_tokens", keep_prior, HookType.AROUND
        )
    parts = os.environ.get("PROBE_FP32", "").split(",")
    if "timestep" in parts:
        HookRegistry.register(
            f"{models}.models.dits.glm_image.GlmImageCombinedTimestepSizeEmbeddings.forward",
            timestep_in_fp32,
            HookType.AROUND,
        )
    if "attention" in parts:
        HookRegistry.register(
            f"{models}.layers.attention.layer.USPAttention.forward",
            attention_in_fp32,
            HookType.AROUND,
        )
    if "PROBE_NO_SYNC" in os.environ:
        HookRegistry.register(
            f"{stages}.bucketized_denoising.BucketizedDenoisingMixin._predict_noise_with_cfg",
            raise_on_sync,
            HookType.AROUND,
        )
    if "PROBE_FAIL" in os.environ:
        for target, hook in (
            (f"{glm_image}.GlmImageBeforeDenoisingStage.forward", fail_in_prepare),
            (f"{stages}.denoising.DenoisingStage._prepare_step_state", fail_in_row),
            (f"{glm_image}.GlmImageDecodingStage.forward", fail_in_decode),
        ):
            HookRegistry.register(target, hook, HookType.BEFORE)
        HookRegistry.register(
            f"{stages}.stepwise_denoising.StepwiseDenoisingMixin.step_samples",
            fail_when_shared,
            HookType.BEFORE,
        )
    if "PROBE_SLOW" in os.environ:
        HookRegistry.register(
            f"{stages}.denoising.DenoisingStage._run_denoising_step", slow_step, HookType.BEFORE
        )
    if "PROBE_HOLD" in os.environ:
        HookRegistry.register(
            f"{glm_image}.GlmImageDecodingStage.forward", hold_decode, HookType.BEFORE
        )
    if "PROBE_SWAP" in os.environ:
        HookRegistry.register(
            f"{stages}.denoising.DenoisingStage._predict_noise", swap_halves, HookType.AFTER
        )
    if "PROBE_SPOIL_RANK" in os.environ:
        HookRegistry.register(
            "sglang.multimodal_gen.runtime.guidance.agreement.agree_on_plan",
            spoil,
            HookType.BEFORE,
        )


def _save(name: str, tensor) -> None:
    import numpy as np

    path = Path(os.environ["PROBE_RECORD"]) / f"{next(_calls):04d}-{name}.npy"
    np.save(path, tensor.detach().float().cpu().numpy())


def record_noise(prediction, stage, *args, **kwargs) -> None:
    _save("noise", prediction)


def record_prior(batch, stage, *args, **kwargs) -> None:
    _save("prior", batch.prior_token_id)


def spoil(plan, *args, **kwargs):
    import torch.distributed as dist

    if plan is None or not plan.samples:  # the ranks agree on an outcome, not on steps
        return None
    sample = plan.samples[0]
    scale = float(os.environ["PROBE_SPOIL_SCALE"])
    if dist.get_rank() != int(os.environ["PROBE_SPOIL_RANK"]) or scale not in sample.scales:
        return None
    scales = (sample.scales[0] + 1, *sample.scales[1:])
    return (replace(plan, samples=(replace(sample, scales=scales),)), *args), kwargs


def keep_prior(original, stage, *args, **kwargs):
    import torch

    key = repr((kwargs["prompt"], kwargs["height"], kwargs["width"], kwargs.get("seed")))
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    path = Path(os.environ["PROBE_KEEP_PRIOR"]) / f"{name}.pt"
    if not path.exists():
        torch.save(original(stage, *args, **kwargs), path)
    return torch.load(path)


def timestep_in_fp32(original, embeddings, timestep, target_size, crop_coords, hidden_dtype):
    import torch

    embeddings.float()
    out = original(embeddings, timestep, target_size, crop_coords, torch.float32)
    return out.to(hidden_dtype)


def attention_in_fp32(original, attention, q, k, v, *args, **kwargs):
    out = original(attention, q.float(), k.float(), v.float(), *args, **kwargs)
    return out.to(q.dtype)


def raise_on_sync(original, stage, *args, **kwargs):
    import torch

    if "no sync" not in kwargs["batch"].prompt:
        return original(stage, *args, **kwargs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        return original(stage, *args, **kwargs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _fail(batch, where: str) -> None:
    import torch.distributed as dist

    prompt = str(batch.prompt)
    everywhere = "on rank 1" not in prompt
    if f"fail in {where}" in prompt and (everywhere or dist.get_rank() == 1):
        raise RuntimeError(f"probe failed in {where}")


def fail_in_prepare(stage, batch, *args, **kwargs) -> None:
    _fail(batch, "prepare")


def fail_in_row(stage, ctx, batch, *args, **kwargs) -> None:
    if len(ctx.timesteps) > 1:
        _fail(batch, "row")


def fail_in_decode(stage, batch, *args, **kwargs) -> None:
    _fail(batch, "decode")


def fail_when_shared(stage, samples, *args, **kwargs) -> None:
    if len(samples) > 1 and "fail when shared" in str(samples[0].batch.prompt):
        raise MemoryError("probe failed a shared step")


def swap_halves(prediction, stage, *args, **kwargs):
    import torch

    from sglang.multimodal_gen.runtime.managers.forward_context import get_forward_context

    if "swapped halves" not in get_forward_context().forward_batch.prompt or len(prediction) < 2:
        return None
    return torch.cat(prediction.chunk(2)[::-1])


def slow_step(stage, ctx, step, batch, *args, **kwargs) -> None:
    if "slow step" in str(batch.prompt) and not batch.is_warmup:
        time.sleep(SLOW_SECONDS)


def hold_decode(stage, batch, *args, **kwargs) -> None:
    if "held decode" in str(batch.prompt):
        while not os.path.exists(os.environ["PROBE_HOLD"]):
            time.sleep(0.01)

"""A plugin for tests: records what the model computed, or spoils a plan on one rank.

Settings in the environment:
    PROBE_RECORD: a directory; every prediction of a branch and every prior is saved there.
    PROBE_SPOIL_RANK, PROBE_SPOIL_SCALE: that rank alters each plan that holds that scale.
    PROBE_BREAK_HOOK: hooks on a target that ends so cannot be applied, as if upstream had moved it.
"""

import itertools
import os
from dataclasses import replace
from pathlib import Path

_calls = itertools.count()


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

    sample = plan.samples[0]
    scale = float(os.environ["PROBE_SPOIL_SCALE"])
    if dist.get_rank() != int(os.environ["PROBE_SPOIL_RANK"]) or scale not in sample.scales:
        return None
    scales = (sample.scales[0] + 1, *sample.scales[1:])
    return (replace(plan, samples=(replace(sample, scales=scales),)), *args), kwargs

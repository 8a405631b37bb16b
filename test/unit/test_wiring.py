"""The contract with upstream: every hook's target exists and takes what the hook relies on."""

import importlib.metadata
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

from sglang.multimodal_gen.guidance_buckets import wiring

ALL_HOOKS = wiring.GUIDANCE_HOOKS + wiring.CPU_OPS_HOOKS + wiring.SRT_HOOKS + wiring.SRT_CPU_HOOKS
DOCS = Path(__file__).parent.parent.parent / "docs"


def target_of(hook: wiring.Hook):
    owner, name = hook.target.rsplit(".", 1)
    return inspect.unwrap(getattr(pkgutil.resolve_name(owner), name))


@pytest.mark.parametrize("hook", ALL_HOOKS, ids=lambda hook: hook.target.rsplit(".", 2)[-1])
def test_target_takes_what_the_hook_relies_on(hook):
    target = target_of(hook)
    parameters = inspect.signature(target).parameters
    assert set(hook.parameters) <= set(parameters), inspect.signature(target)


@pytest.mark.parametrize("hook", ALL_HOOKS, ids=lambda hook: hook.function)
def test_function_exists_and_fits_its_kind(hook):
    function = hook.resolve()
    if hook.kind == "replace":
        assert issubclass(function, target_of(hook))
    else:
        assert callable(function)
        assert hook.purpose
    if hook.kind == "around":
        assert next(iter(inspect.signature(function).parameters)) == "original"


def test_targets_are_hooked_once():
    targets = [hook.target for hook in ALL_HOOKS]
    assert len(targets) == len(set(targets))


def test_entry_points():
    entries = importlib.metadata.entry_points(group="sglang.multimodal_gen.plugins")
    ours = {entry.name: entry.load() for entry in entries}
    assert ours["guidance_buckets"] is wiring.register_guidance
    assert ours["cpu_norm_ops"] is wiring.register_cpu_ops
    (srt,) = importlib.metadata.entry_points(group="sglang.srt.plugins", name="guidance_buckets")
    assert srt.load() is wiring.register_srt


def test_what_the_stage_builds_on():
    """The upstream methods that the stage overrides or calls, with the arguments it gives them."""
    from sglang.multimodal_gen.runtime.distributed.cfg_parallel_utils import run_cfg_parallel
    from sglang.multimodal_gen.runtime.pipelines_core.stages.bucketized_denoising import (
        BucketizedDenoisingMixin,
    )
    from sglang.multimodal_gen.runtime.pipelines_core.stages.denoising import DenoisingStage

    for name in (
        *("_before_denoising_loop", "_run_denoising_step", "_predict_noise_with_cfg"),
        "_finalize_denoising_loop",
    ):
        ours = inspect.signature(getattr(BucketizedDenoisingMixin, name)).parameters
        theirs = inspect.signature(inspect.unwrap(getattr(DenoisingStage, name))).parameters
        assert list(ours) == list(theirs), name
    predict = inspect.signature(DenoisingStage._predict_noise).parameters
    assert list(predict)[1:6] == [
        *("current_model", "latent_model_input", "timestep", "target_dtype", "guidance"),
    ]
    assert list(inspect.signature(run_cfg_parallel).parameters) == ["policy", "predict_fn"]


def test_every_hook_is_in_the_upstreaming_page():
    page = (DOCS / "upstreaming.md").read_text()
    for hook in ALL_HOOKS:
        name = ".".join(hook.target.rsplit(".", 2)[-2:]) if re.search(
            r"\.[A-Z]\w+\.\w+$", hook.target
        ) else hook.target.rsplit(".", 1)[-1]
        assert name in page, hook.target


def test_pinned_version_is_the_tested_one():
    pins = (DOCS.parent / "constraints.txt").read_text()
    assert f"sglang=={importlib.metadata.version('sglang')}\n" in pins

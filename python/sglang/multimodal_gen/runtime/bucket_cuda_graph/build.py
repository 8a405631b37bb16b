# SPDX-License-Identifier: Apache-2.0
"""From a server's settings to the graphs of a denoising stage, or to why there are none."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from sglang.multimodal_gen.configs.bucket_graphs import BucketGraphConfig, parse_resolution
from sglang.multimodal_gen.configs.guidance_curves import GuidanceError
from sglang.multimodal_gen.runtime.bucket_cuda_graph.inputs import StaticInputs
from sglang.multimodal_gen.runtime.bucket_cuda_graph.manager import BucketGraphs
from sglang.multimodal_gen.runtime.bucket_cuda_graph.recorder import (
    BreakableRecorder,
    FullGraphRecorder,
    Recorder,
)
from sglang.multimodal_gen.runtime.bucket_cuda_graph.report import log_graphs, publish_graphs
from sglang.multimodal_gen.runtime.guidance.support import (
    GuidanceUnsupported,
    offloads_during_compile,
)
from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context
from sglang.multimodal_gen.runtime.platforms import current_platform
from sglang.multimodal_gen.runtime.utils.logging_utils import init_logger
from sglang.multimodal_gen.runtime.utils.precision import (
    autocast_context,
    resolve_component_precision,
    resolve_precision,
)

logger = init_logger(__name__)

_MEMORY_SHARE = 0.1  # of the device, where no budget is given
_DTYPES = {torch.bfloat16, torch.float16, torch.float32}
# The attention backends whose metadata does not change from step to step.
_STATIC_METADATA = ("NoneType", "FlashAttentionMetadata")


def settings_obstacles(server_args: Any) -> Iterator[str]:
    """What in a server's settings stands in the way of graphs."""
    if server_args.enable_torch_compile and not server_args.regional_compile:
        yield "--enable-torch-compile without --regional-compile (not tested)"
    elif server_args.enable_torch_compile and server_args.bucket_graphs.mode == "breakable":
        yield "--enable-torch-compile (tested with full graphs only)"
    if offloads_during_compile(server_args):
        yield "--offload-during-compile (the DiT's weights move until the first request)"
    if server_args.quantization or server_args.transformer_weights_path:
        yield "a quantized DiT (not tested)"
    ranks = server_args.num_gpus // max(1, server_args.dp_size or 1)
    if ranks > 1:
        yield (
            f"{ranks} ranks a replica (a capture or a replay that fails on one rank would leave "
            "the others waiting in a collective)"
        )
    if server_args.is_dit_layerwise_offload_selected or server_args.use_fsdp_inference:
        yield "a DiT whose weights move (layerwise offload or FSDP)"


def model_obstacles(stage: Any) -> Iterator[str]:
    """What in a loaded model stands in the way."""
    adapter = stage.row_adapter
    if adapter is None or not adapter.in_graphs:
        yield f"{type(stage.transformer).__name__}, a family whose rows are not known to graphs"
        return
    parameters = list(stage.transformer.parameters())
    devices = {parameter.device.type for parameter in parameters}
    if devices != {"cuda"}:
        yield f"a DiT on {', '.join(sorted(devices))} (offloaded between requests)"
    if not {parameter.dtype for parameter in parameters} <= _DTYPES:
        yield "a quantized DiT (not tested)"
    try:
        metadata = type(_attention_metadata(stage)).__name__
    except Exception as error:
        metadata = repr(error)
    if metadata not in _STATIC_METADATA:
        yield f"an attention backend that plans each step ({metadata})"


def check_settings(server_args: Any) -> None:
    """At start-up, before a model is loaded.

    Raises:
        GuidanceUnsupported: where graphs were asked for by name and cannot be.
    """
    config: BucketGraphConfig = server_args.bucket_graphs
    if config.mode not in ("full", "breakable"):
        return
    obstacles = list(settings_obstacles(server_args))
    if not current_platform.is_cuda():
        obstacles.insert(0, "a host without a CUDA GPU")
    if obstacles:
        raise GuidanceUnsupported(
            f"--bucket-graphs {config.mode} does not combine with " + "; ".join(obstacles)
        )


def build_bucket_graphs(stage: Any, server_args: Any) -> BucketGraphs | None:
    """Capture the declared buckets of a stage; None where its server runs without graphs.

    Raises:
        GuidanceUnsupported: where graphs were asked for by name and the model cannot have them.
    """
    config: BucketGraphConfig = server_args.bucket_graphs
    if config.mode == "off" or not current_platform.is_cuda():
        return None
    obstacles = list(settings_obstacles(server_args)) or list(model_obstacles(stage))
    if obstacles:
        reasons = "; ".join(obstacles)
        if config.mode != "auto":
            raise GuidanceUnsupported(
                f"--bucket-graphs {config.mode} does not combine with {reasons}"
            )
        logger.info("Bucket graphs are off: they do not combine with %s", reasons)
        return None
    device = next(stage.transformer.parameters()).device
    recorder = (BreakableRecorder if config.mode == "breakable" else FullGraphRecorder)(device)
    total = torch.cuda.get_device_properties(device).total_memory
    budget = _MEMORY_SHARE * total if config.memory_gb is None else config.memory_gb * 2**30
    graphs = make_graphs(stage, server_args, recorder, int(budget))
    capture_declared(graphs, stage, server_args)
    if config.mode == "auto" and graphs.refused and not graphs.graphs:
        logger.info("Bucket graphs are off: no bucket has one that works and pays")
        return None
    return graphs


def make_graphs(
    stage: Any, server_args: Any, recorder: Recorder, budget_bytes: int
) -> BucketGraphs:
    """The graphs of a stage, none captured yet."""
    dtype = resolve_precision(server_args, "dit", precision_attr="dit_precision")
    context = _context_of(stage)
    return BucketGraphs(
        adapter=stage.row_adapter,
        config=server_args.bucket_graphs,
        guidance_rows=server_args.guidance_rows,
        dtype=dtype,
        text_dtypes=_text_dtypes(server_args),
        device=next(stage.transformer.parameters()).device,
        forward=_forward_of(stage, server_args, dtype, context),
        context=context,
        mount=lambda quality: stage.mount(_as_requested(quality)),
        recorder=recorder,
        budget_bytes=budget_bytes,
    )


def _text_dtypes(server_args: Any) -> list[torch.dtype]:
    count = len(server_args.pipeline_config.text_encoder_precisions)
    names = ["text_encoder", *(f"text_encoder_{index}" for index in range(2, count + 1))]
    return [resolve_component_precision(server_args, name) for name in names[:count]]


def _context_of(stage: Any) -> Callable[[], AbstractContextManager]:
    metadata = _attention_metadata(stage)

    @contextmanager
    def context() -> Iterator[None]:
        with (
            current_platform.inference_mode(),
            torch.no_grad(),
            set_forward_context(current_timestep=0, attn_metadata=metadata),
        ):
            yield

    return context


def _forward_of(stage: Any, server_args: Any, dtype: torch.dtype, context: Callable):
    adapter, pipeline_config = stage.row_adapter, server_args.pipeline_config

    def forward(inputs: StaticInputs, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        packed = inputs.packed(rows)
        autocast = autocast_context(dtype, server_args.disable_autocast)
        with context(), autocast, adapter.attend(packed):
            latents, timestep_R = inputs.row_inputs(rows)
            prediction = stage._predict_noise(
                current_model=stage.transformer,
                latent_model_input=latents,
                timestep=timestep_R,
                target_dtype=dtype,
                guidance=None,
                **packed.kwargs,
            )
            prediction = pipeline_config.slice_noise_pred(prediction, latents)
            return prediction, inputs.combine(prediction, rows)

    return forward


def _as_requested(quality: str) -> Any:
    """As much of a request as mounting what it asks for reads."""
    sampling_params = SimpleNamespace(quality=quality, attention_backend_override=None)
    return SimpleNamespace(sampling_params=sampling_params, skip_softmax_params=None)


def _attention_metadata(stage: Any) -> Any:
    batch = SimpleNamespace(raw_latent_shape=None)
    return stage._build_attn_metadata(0, batch, stage.server_args)


def capture_declared(graphs: BucketGraphs, stage: Any, server_args: Any) -> None:
    """Capture the buckets that the server was told of, largest first, and log them as a table."""
    quality = _sampling_defaults(server_args).quality
    latent_shapes = [
        _latent_shape(stage, server_args, *size) for size in declared_resolutions(server_args)
    ]
    for bucket in graphs.declared(latent_shapes, quality):
        graphs.capture(bucket)
    log_graphs(graphs)
    publish_graphs(graphs)


def declared_resolutions(server_args: Any) -> list[tuple[int, int]]:
    """(width, height) of every resolution to capture before the server is ready."""
    given = server_args.bucket_graphs.resolutions or server_args.warmup_resolutions
    if given:
        return list(dict.fromkeys(map(parse_resolution, given)))
    if server_args.warmup_mode == "off":
        return []
    defaults = _sampling_defaults(server_args)
    return [(defaults.width, defaults.height)] if defaults.width and defaults.height else []


def _sampling_defaults(server_args: Any) -> Any:
    from sglang.multimodal_gen.runtime.warmup_request_builder import get_model_sampling_defaults

    return get_model_sampling_defaults(server_args)


def _latent_shape(stage: Any, server_args: Any, width: int, height: int) -> tuple[int, ...]:
    pixels = server_args.pipeline_config.vae_config.get_vae_scale_factor()
    grain = pixels * stage.transformer.patch_size
    if width % grain or height % grain:
        raise GuidanceError(
            "--bucket-graph-resolutions", f"{width}x{height}", f"multiples of {grain}"
        )
    return stage.transformer.config.in_channels, height // pixels, width // pixels

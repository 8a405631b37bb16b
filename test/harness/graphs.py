"""What tests do with bucket graphs: random steps, the same steps eagerly, a server's counts."""

import re
from contextlib import contextmanager
from dataclasses import replace

import torch

from sglang.multimodal_gen.runtime.bucket_cuda_graph.buckets import Cost
from sglang.multimodal_gen.runtime.bucket_cuda_graph.graph import TOLERANCE
from sglang.multimodal_gen.runtime.bucket_cuda_graph.manager import take

SCALES = (2.0, 1.0, 3.5, 0.0, 7.0, 1.0)  # in turn; 1 and 0 are unguided


def prefer_replays(graphs) -> None:
    """Make the cost rule pad whatever a graph holds."""
    for graph in graphs.graphs.values():
        graph.cost = Cost(replay_ms=1e-3, eager_ms=float(graph.bucket.rows))


def install_eager_graphs(worker):
    """Graphs of every declared bucket in a worker's stage, by a recorder that runs eagerly."""
    from sglang.multimodal_gen.runtime.bucket_cuda_graph.build import capture_declared, make_graphs
    from sglang.multimodal_gen.runtime.bucket_cuda_graph.recorder import EagerRecorder

    graphs = make_graphs(worker.stage, worker.server_args, EagerRecorder(), 2**30)
    graphs.config = replace(graphs.config, mode="full")  # on a CPU none pays
    capture_declared(graphs, worker.stage, worker.server_args)
    prefer_replays(graphs)
    worker.stage.graphs = graphs
    return graphs


def random_samples(graphs, bucket, rows: int, seed: int):
    """Samples of exactly `rows` rows, guided and unguided, with texts that fit the bucket."""
    from sglang.multimodal_gen.configs.guidance_curves import branches_of
    from sglang.multimodal_gen.runtime.bucket_cuda_graph.inputs import GraphSample
    from sglang.multimodal_gen.runtime.bucket_cuda_graph.manager import _random_serials

    shape = bucket.shape
    generator = torch.Generator(graphs.device).manual_seed(seed)

    def random(*size):
        return torch.randn(size, generator=generator, device=graphs.device)

    samples, left, index = [], rows, seed
    while left:
        scale = SCALES[index % len(SCALES)]
        if left == 1 and len(branches_of(scale)) == 2:
            scale = 1.0
        names = [name for name in ("uncond", "cond") if name in branches_of(scale)]
        length = shape.text_length
        if shape.masked:
            length = 2 + (index * 13) % (shape.text_length - 1)
        samples.append(
            GraphSample(
                serial=next(_random_serials),
                latents=random(1, *shape.latent_shape).to(graphs.dtype),
                timestep_B=random(1).abs() * 300 + 1,
                scale=scale,
                branches={
                    name: graphs.example(
                        shape,
                        # the uncond text of a masked sample is shorter
                        length if name == "cond" or not shape.masked else 1,
                        generator,
                    )
                    for name in names
                },
            )
        )
        left -= len(names)
        index += 1
    return samples


def replay(graphs, bucket, samples):
    """Each sample's combine from this very bucket's graph, ``[images, ...]`` in fp32."""
    inputs, graph = graphs._inputs[bucket.shape], graphs.graphs[bucket]
    inputs.load(samples, bucket.rows)
    graph.replay()
    return [made.combined for made in take(graph, inputs, samples)]


def eagerly(worker, samples):
    """The same from packed rows without padding, as an eager step computes them."""
    from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context

    stage, adapter = worker.stage, worker.stage.row_adapter
    pairs = [(s, name) for name in ("uncond", "cond") for s in samples if name in s.branches]
    packed = adapter.pack([s.branches[name] for s, name in pairs])
    with (
        torch.inference_mode(),
        set_forward_context(current_timestep=0, attn_metadata=None),
        adapter.attend(packed),
    ):
        rows = stage._predict_noise(
            current_model=stage.transformer,
            latent_model_input=torch.cat([s.latents for s, _ in pairs]),
            timestep=torch.cat([s.timestep_B for s, _ in pairs]),
            target_dtype=stage.graphs.dtype,
            guidance=None,
            **packed.kwargs,
        ).float()
    parts = {(s.serial, name): row for (s, name), row in zip(pairs, rows.split([1] * len(pairs)))}
    combined = []
    for sample in samples:
        found = [parts[sample.serial, name] for name in sample.branches]
        combined.append(found[0] + sample.scale * (found[-1] - found[0]))
    return combined


def assert_close(got, wanted, dtype) -> None:
    """Within rounding of the batch shape: kernels of another row count sum in another order."""
    for one, other in zip(got, wanted, strict=True):
        one, other = one.float(), other.float()
        scale = other.abs().max()
        # a combine at scale s multiplies the rounding of both branches by up to 2s
        assert (one - other).abs().max() <= 32 * TOLERANCE[dtype] * scale, (
            one - other
        ).abs().max() / scale


@contextmanager
def forward_replaced(graphs, forward):
    """Captures run `forward` instead of the DiT."""
    own = graphs.forward
    graphs.forward = forward
    try:
        yield
    finally:
        graphs.forward = own


def graph_metric(server, name: str) -> dict[str, float]:
    """``sglang:diffusion_bucket_graph_{name}`` of a server's ``/metrics``, by bucket or reason."""
    pattern = rf'^sglang:diffusion_bucket_graph_{name}{{.*?(?:bucket|reason)="([^"]*)".*}} (\S+)$'
    found = re.findall(pattern, server.get("/metrics"), re.M)
    return {label: float(value) for label, value in found}

"""At any precision samples share forwards, and what they bring fits the static inputs of graphs."""

import pytest

from harness.graphs import assert_close, install_eager_graphs
from harness.worker import Worker

REQUESTS = [
    dict(num_inference_steps=3, seed=1, guidance_curve="constant:3"),
    dict(num_inference_steps=4, seed=2, guidance_curve="front:2:1@0.5", prompt='a sign "a"'),
]


@pytest.mark.parametrize(
    ("family", "precisions"),
    [
        ("glm-image", {}),  # the family's own
        ("glm-image", {"dit_precision": "fp16", "text_encoder_precisions": ("bf16",)}),
        ("sd3-medium", {}),
        ("sd3-medium", {"text_encoder_precisions": ("fp16", "bf16", "bf16")}),
        ("sd3-medium", {"component_precisions": {"text_encoder_2": "fp32"}}),
        ("qwen-image", {}),
        ("sana", {}),
    ],
)
def test_together_alone_and_replayed(checkpoints, family, precisions):
    from sglang.multimodal_gen.runtime.utils.precision import resolve_precision

    worker = Worker(
        checkpoints[family],
        guidance_buckets=8,
        bucket_graph_rows=[1, 2, 4],
        bucket_graph_resolutions=["64x64"],
        bucket_graph_text_lengths=[32],
        **precisions,
    )
    try:
        alone = [worker.denoise(request)[0] for request in REQUESTS]
        dtype = resolve_precision(worker.server_args, "dit", precision_attr="dit_precision")
        assert_close(worker.denoise(*REQUESTS), alone, dtype)
        if not worker.stage.row_adapter.in_graphs:
            return
        graphs = install_eager_graphs(worker)
        assert_close(worker.denoise(*REQUESTS), alone, dtype)
        assert sum(graphs.replays.values()) and not graphs.misses
    finally:
        worker.close()

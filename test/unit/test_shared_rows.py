"""Samples that share a forward get what they would get alone, one forward a branch."""

import pytest
import torch

from harness.engine import FP32
from harness.graphs import assert_close
from harness.worker import Worker

FP32_TEXT = {"glm-image": 1, "sd3-medium": 3, "qwen-image": 1, "sana": 1}  # text encoders


def options(family: str) -> dict:
    return {**FP32, "text_encoder_precisions": ("fp32",) * FP32_TEXT[family]}


def split_and_shared(model, family: str, requests: list[dict]) -> tuple[list, list]:
    """Final latents of requests alone, with split rows, and of all of them together."""
    latents = []
    for rows, groups in (("split", [[one] for one in requests]), ("auto", [requests])):
        worker = Worker(model, guidance_buckets=8, guidance_rows=rows, **options(family))
        try:
            latents.append([made for group in groups for made in worker.denoise(*group)])
        finally:
            worker.close()
    return latents[0], latents[1]


def request(**fields) -> dict:
    return dict(num_inference_steps=3, guidance_curve="constant:3", **fields)


@pytest.mark.parametrize("family", FP32_TEXT)
def test_several_images_of_one_request(checkpoints, family):
    requests = [
        request(seed=1, num_outputs_per_prompt=2),
        request(seed=5) | {"guidance_curve": "front:2:1@0.5"},
    ]
    split, shared = split_and_shared(checkpoints[family], family, requests)
    assert [len(latents) for latents in shared] == [2, 1]
    assert_close(shared, split, torch.float32)


def test_a_picture_and_one_on_its_side(checkpoints):
    """Qwen-Image's packed latents have one shape for both; their positions differ."""
    requests = [request(width=96, height=64), request(width=64, height=96)]
    split, shared = split_and_shared(checkpoints["qwen-image"], "qwen-image", requests)
    assert_close(shared, split, torch.float32)


def test_texts_of_two_lengths_without_a_mask(checkpoints):
    """Stable Diffusion 3 takes another length for the prompt alone; its attention takes no mask."""
    requests = [request(max_sequence_length=16), request()]
    split, shared = split_and_shared(checkpoints["sd3-medium"], "sd3-medium", requests)
    assert_close(shared, split, torch.float32)

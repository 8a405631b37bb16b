"""What a request costs at the borders between processes, in bytes."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from harness.faulty_ar import CODEBOOK, FaultyAR
from sglang.multimodal_gen.configs.glm_image_prior import SOURCE_IMAGES_KEY, PriorConfig
from sglang.multimodal_gen.configs.sample.glmimage import GlmImageSamplingParams
from sglang.multimodal_gen.guidance_buckets.disagg_hooks import carry_source_images
from sglang.multimodal_gen.runtime.disaggregation.scheduler_mixin import extract_transfer_fields
from sglang.multimodal_gen.runtime.disaggregation.transport.codec import pack_tensors
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages import (
    glm_image_prior,
)

SIDE = 1024


@pytest.fixture(scope="module")
def asked(glm):
    """A service, and the AR server that it asks."""
    from transformers import AutoProcessor

    with FaultyAR() as ar:
        service = glm_image_prior.build_service(
            PriorConfig(url=ar.url),
            processor=AutoProcessor.from_pretrained(glm / "processor"),
            codebook=CODEBOOK,
            sampling=glm_image_prior.sampling_of(str(glm)),
            server_metrics=None,
        )
        yield service, ar
        service.close()


def photo() -> bytes:
    """A JPEG file of a megapixel that does not compress away."""
    data = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (SIDE // 8, SIDE // 8, 3), np.uint8)
    Image.fromarray(noise).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(data, "JPEG")
    return data.getvalue()


def request(image_path=None) -> Req:
    params = GlmImageSamplingParams(
        prompt="a red cube on a table", width=SIDE, height=SIDE, image_path=image_path
    )
    return Req(sampling_params=params, request_id="1")


def test_text_to_image(asked):
    service, ar = asked
    ar.reset()
    req = request()
    (prior,) = service.fetch([req]).result()
    assert ar.sizes[0] < 1000  # to the AR server; the answer is some 5 characters a token
    glm_image_prior.assign_prior(req, prior)
    assert bytes_to_a_denoiser(req) < 40_000  # 4096 token ids of 8 bytes


def test_image_to_image(asked, tmp_path):
    service, ar = asked
    ar.reset()
    encoded = photo()
    path = tmp_path / "source.jpg"
    path.write_bytes(encoded)
    req = request(image_path=[str(path)])

    class Head:
        prior_config = PriorConfig(url="http://a")
        disagg_role = "server"

    carry_source_images(req, Head)
    with pytest.raises(glm_image_prior.PriorError, match="no source-image tokens"):
        service.fetch([req]).result()  # the bytes were sent all the same
    tokens = (SIDE // 32) ** 2
    assert ar.sizes[0] < len(encoded) * 4 / 3 + 8 * tokens
    req.prior_token_id = torch.zeros(1, 4 * tokens, dtype=torch.long)
    req.prior_token_image_ids = [torch.zeros(4 * tokens, dtype=torch.long)]
    assert len(encoded) < bytes_to_a_denoiser(req) < len(encoded) * 4 / 3 + 80_000
    assert req.image_path is None and req.extra[SOURCE_IMAGES_KEY]


def bytes_to_a_denoiser(req: Req) -> int:
    """Of one message; what is no JSON in it is token ids."""
    tensors, fields = extract_transfer_fields(req)
    for value in tensors.values():
        for tensor in value if isinstance(value, list) else [value]:
            assert tensor.dtype == torch.long
    metadata, buffers = pack_tensors(tensors, fields)
    return len(metadata) + sum(buffer._view.nbytes for buffer in buffers)

# SPDX-License-Identifier: Apache-2.0
"""GLM-Image's processor, taking encoded source images beside tokenized prompts.

Upstream's takes pixel values with `input_ids`, and encoded images with text alone. A diffusion
server has tokenized the prompt and should send the image file, not its pixels.

SRT gives an architecture to the last module of this package, by name, that claims it: this one.
"""

import asyncio
import base64
import io
from typing import Any

import torch
from PIL import Image, ImageOps

from sglang.multimodal_gen.configs.glm_image_prior import SOURCE_IMAGES_KEY
from sglang.multimodal_gen.configs.sample.glmimage import align_glm_image_resolution
from sglang.srt.models.glm_image_vl import GlmImageForConditionalGeneration
from sglang.srt.multimodal.processors.glm_image import GlmImageProcessor


class GlmImageSourceProcessor(GlmImageProcessor):
    models = [GlmImageForConditionalGeneration]

    async def process_mm_data_async(
        self, image_data: list[Any] | None, input_text: Any, request_obj: Any, *args, **kwargs
    ):
        """Upstream's, after images under `SOURCE_IMAGES_KEY` became pixel values.

        Raises:
            ValueError: for what is no image, or of another size than the request's grids.
        """
        loop = asyncio.get_running_loop()
        prepared = [
            await loop.run_in_executor(self.io_executor, self._with_pixels, data)
            if isinstance(data, dict) and SOURCE_IMAGES_KEY in data
            else data
            for data in image_data or ()
        ]
        return await super().process_mm_data_async(
            prepared, input_text, request_obj, *args, **kwargs
        )

    def _with_pixels(self, data: dict[str, Any]) -> dict[str, Any]:
        images = [_decode(url) for url in data[SOURCE_IMAGES_KEY]]
        inputs = self._processor.image_processor(images=images, return_tensors="pt")
        grids_N3 = torch.tensor(data["image_grid_thw"])
        if not torch.equal(grids_N3[: len(images)], inputs["image_grid_thw"]):
            raise ValueError(
                f"image_grid_thw: got {grids_N3.tolist()}, wanted "
                f"{inputs['image_grid_thw'].tolist()} of the source images first"
            )
        return {"pixel_values": inputs["pixel_values"], "image_grid_thw": grids_N3}


def _decode(url: str) -> Image.Image:
    """RGB and upright, both sides rounded up to multiples of 32."""
    if not isinstance(url, str) or not url.startswith("data:"):
        raise ValueError(f"{SOURCE_IMAGES_KEY}: wanted data URLs")
    encoded = base64.b64decode(url.split(",", 1)[1], validate=True)
    try:
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded))).convert("RGB")
    except OSError as error:
        raise ValueError(f"{SOURCE_IMAGES_KEY}: {error}") from None
    size = align_glm_image_resolution(*image.size)
    return image if image.size == size else image.resize(size, Image.Resampling.LANCZOS)

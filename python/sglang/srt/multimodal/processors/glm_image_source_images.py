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

from sglang.multimodal_gen.configs.glm_image_sources import check_pixels, fit_source
from sglang.srt.models.glm_image_vl import GlmImageForConditionalGeneration
from sglang.srt.multimodal.processors.glm_image import GlmImageProcessor


class GlmImageSourceProcessor(GlmImageProcessor):
    models = [GlmImageForConditionalGeneration]

    async def process_mm_data_async(
        self, image_data: list[Any] | None, input_text: Any, request_obj: Any, *args, **kwargs
    ):
        """Upstream's, after encoded images beside `input_ids` became pixel values.

        Args:
            image_data: then data URLs, one a source image in the prompt's order, and a dictionary
                with the grids of all source images and of the picture.

        Raises:
            ValueError: for what is no image, or of another size than the request's grids.
        """
        urls = [item for item in image_data or () if isinstance(item, str)]
        if urls and isinstance(input_text, list):
            (grids,) = [item for item in image_data if isinstance(item, dict)]
            image_data = [
                await asyncio.get_running_loop().run_in_executor(
                    self.io_executor, self._with_pixels, urls, grids["image_grid_thw"]
                )
            ]
        return await super().process_mm_data_async(
            image_data, input_text, request_obj, *args, **kwargs
        )

    def _with_pixels(self, urls: list[str], grids: list[list[int]]) -> dict[str, torch.Tensor]:
        image_processor = self._processor.image_processor
        images = [fit_source(_decode(url), image_processor) for url in urls]
        inputs = image_processor(images=images, return_tensors="pt")
        sources_N3 = inputs["image_grid_thw"]
        grids_N3 = torch.tensor(grids)
        if not torch.equal(grids_N3[: len(images)], sources_N3):
            raise ValueError(
                f"image_grid_thw: got {grids}, wanted {sources_N3.tolist()} of the images first"
            )
        return {"pixel_values": inputs["pixel_values"], "image_grid_thw": grids_N3}


def _decode(url: str) -> Image.Image:
    """RGB and upright."""
    if not url.startswith("data:"):
        raise ValueError("image_data: wanted data URLs beside input_ids")
    encoded = base64.b64decode(url.split(",", 1)[1], validate=True)
    try:
        image = Image.open(io.BytesIO(encoded))
        check_pixels(image)
        return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, Image.DecompressionBombError) as error:
        raise ValueError(f"image_data: {error}") from None

# SPDX-License-Identifier: Apache-2.0
"""The size at which GLM-Image takes a source image; no torch.

The AR model's image processor scales an image whose sides are outside its limits (512 to 2048
pixels in the published checkpoint). The DiT takes the VAE's latents of the same image, four of its
tokens for one of the AR model's, so it must see the size that the AR model sees.
"""

from typing import Any

from PIL import Image

from sglang.multimodal_gen.configs.sample.glmimage import align_glm_image_resolution

MAX_SOURCE_PIXELS = 2**26  # 8192 x 8192


def check_pixels(image: Image.Image) -> None:
    """Before the pixels of an opened image take memory. Raises ValueError for too many."""
    if image.width * image.height > MAX_SOURCE_PIXELS:
        raise ValueError(f"more than {MAX_SOURCE_PIXELS} pixels")


def source_size(size: tuple[int, int], image_processor: Any) -> tuple[int, int]:
    """The nearest size that the AR model's processor leaves alone, in multiples of 32 pixels.

    Args:
        size: (width, height) of the image as it came.
        image_processor: GLM-Image's, as transformers loads it.

    Raises:
        ValueError: for sides of more than 4 : 1.
    """
    from transformers.models.glm_image.image_processing_pil_glm_image import smart_resize

    width, height = align_glm_image_resolution(*size)
    # in pixels of the AR model's grid, one for 2 x 2 of the image
    grid_height, grid_width = smart_resize(
        height,
        width,
        factor=image_processor.patch_size * image_processor.merge_size,
        min_pixels=image_processor.size["shortest_edge"],
        max_pixels=image_processor.size["longest_edge"],
    )
    return 2 * grid_width, 2 * grid_height


def fit_source(image: Image.Image, image_processor: Any) -> Image.Image:
    """`image` at its `source_size`. Raises ValueError, as that does."""
    size = source_size(image.size, image_processor)
    return image if image.size == size else image.resize(size, Image.Resampling.LANCZOS)

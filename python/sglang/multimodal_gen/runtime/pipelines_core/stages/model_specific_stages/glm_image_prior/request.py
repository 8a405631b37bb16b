# SPDX-License-Identifier: Apache-2.0
"""From a request to what the AR server is sent and has to answer."""

import base64
import hashlib
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from PIL import Image, UnidentifiedImageError

from sglang.multimodal_gen.configs.glm_image_prior import SOURCE_IMAGES_KEY, PriorError
from sglang.multimodal_gen.configs.glm_image_sources import (
    check_pixels,
    fit_source,
    source_size,
)
from sglang.multimodal_gen.configs.sample.glmimage import align_glm_image_resolution
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.glm_image import (
    GlmImageAR,
    _num_outputs_per_prompt,
    _seed_for_output,
    image_path_to_list,
)
from sglang.multimodal_gen.runtime.utils.vision import load_image

from .answer import Wanted

# what Pillow raises for a damaged file
_NOT_AN_IMAGE = (
    *(OSError, ValueError, SyntaxError, NotImplementedError),
    Image.DecompressionBombError,
)
_DATA_URL = "data:image/*;base64,"
_MAX_SHOWN = 200  # characters of a cause; it may repeat a whole image
_MAX_SEED = 2**63 - 1  # SRT's


@dataclass(frozen=True, kw_only=True)
class PriorRequest:
    """What prior tokens depend on, as plain data.

    Attributes:
        height, width: of the picture, in pixels; None takes the first source image's.
        seeds: one an image of the request.
        sources: paths, data URLs or addresses of the source images.
    """

    prompt: str
    height: int | None
    width: int | None
    seeds: tuple[int | None, ...]
    sources: tuple[str, ...]

    @classmethod
    def of(cls, req: Req) -> "PriorRequest":
        return cls(
            prompt=req.prompt,
            height=req.height,
            width=req.width,
            seeds=tuple(
                _seed_for_output(req.seed, image) for image in range(_num_outputs_per_prompt(req))
            ),
            sources=tuple(
                image_path_to_list(req.image_path)
                if req.image_path
                else req.extra.get(SOURCE_IMAGES_KEY, ())
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A `PriorRequest` with its sources read and its sizes known.

    Attributes:
        height, width: multiples of 32.
        wanted_size: (width, height) that the picture is cut down to.
        token_h, token_w: the grid of tokens that the DiT takes, before it is doubled.
        source_grids: (height, width) in tokens of each source image.
        payload: what ``/generate`` takes, without a seed.
        key: equal for requests whose tokens are equal for equal seeds.
    """

    height: int
    width: int
    wanted_size: tuple[int, int]
    token_h: int
    token_w: int
    source_grids: tuple[tuple[int, int], ...]
    payload: dict[str, Any]
    wanted: Wanted
    key: tuple

    def body(self, seed: int | None) -> bytes:
        parameters = dict(self.payload["sampling_params"])
        if seed is not None:
            parameters["sampling_seed"] = seed & _MAX_SEED
        return orjson.dumps(self.payload | {"sampling_params": parameters})


def prepare(
    request: PriorRequest,
    processor: Any,
    codebook: int,
    context: int | None = None,
    sampling: Mapping[str, float] | None = None,
) -> Prepared:
    """Read the source images, tokenize the prompt. Not for two threads at a time.

    Args:
        processor: GLM-Image's, as transformers loads it.
        codebook: how many codes the DiT knows.
        context: most tokens of a prompt and its picture, or None where that is not known.
        sampling: `sampling_of` the checkpoint; None draws at temperature 1 from all codes.

    Raises:
        PriorError: 400, for a source image that cannot be read or has a shape that the model
            cannot take, and for a picture too large.
    """
    encoded = [read_encoded(source, i) for i, source in enumerate(request.sources)]
    originals = [decode(image, i) for i, image in enumerate(encoded)]
    wanted_size = _wanted_size(request, originals)
    width, height = align_glm_image_resolution(*wanted_size)
    for i, image in enumerate(originals):
        _fitted_size(image, processor, i)
    images = [fit_source(image, processor.image_processor) for image in originals]
    inputs = _tokenize(processor, request.prompt, images, height, width)
    grids_N3 = inputs["image_grid_thw"]
    max_new_tokens, skipped, token_h, token_w = GlmImageAR._compute_generation_params(
        image_grid_thw=grids_N3, is_text_to_image=not images
    )
    source_grids = tuple((int(h), int(w)) for _, h, w in grids_N3[: len(images)].tolist())
    input_ids = inputs["input_ids"][0].tolist()
    if context is not None and len(input_ids) + max_new_tokens > context:
        raise _too_large(wanted_size, originals, len(input_ids) + max_new_tokens, context)
    sources = [_DATA_URL + base64.b64encode(image).decode() for image in encoded]
    digest = hashlib.sha256(b"".join(hashlib.sha256(image).digest() for image in encoded))
    return Prepared(
        height=height,
        width=width,
        wanted_size=wanted_size,
        token_h=token_h,
        token_w=token_w,
        source_grids=source_grids,
        payload={
            "input_ids": input_ids,
            "image_data": [*sources, {"image_grid_thw": grids_N3.tolist()}],
            "sampling_params": {
                **GlmImageAR._external_ar_sampling_params(max_new_tokens, None),
                **(sampling or {}),
            },
        },
        wanted=Wanted(
            skipped=skipped,
            tokens=token_h * token_w,
            source_tokens=tuple(h * w for h, w in source_grids),
            codebook=codebook,
        ),
        key=(request.prompt, height, width, digest.digest()),
    )


def check_request(req: Req, processor: Any, context: int) -> None:
    """Before the AR model of the same process begins: the tokens of the picture, and its sources.

    Raises:
        PriorError: 400, for a picture that cannot fit, and for a source image that `prepare` would
            refuse.
    """
    request = PriorRequest.of(req)
    originals = [decode(read_encoded(one, i), i) for i, one in enumerate(request.sources)]
    sizes = [_fitted_size(image, processor, i) for i, image in enumerate(originals)]
    wanted_size = _wanted_size(request, originals)
    tokens = sum(width * height // 32**2 for width, height in [wanted_size, *sizes])
    if tokens > context:
        raise _too_large(wanted_size, originals, f"more than {tokens}", context)


def _wanted_size(request: PriorRequest, originals: list[Image.Image]) -> tuple[int, int]:
    """(width, height) of the picture: the first source image's, where the request has none."""
    width, height = originals[0].size if originals else (0, 0)
    return request.width or width, request.height or height


def _too_large(
    size: tuple[int, int], sources: list[Image.Image], tokens: Any, context: int
) -> PriorError:
    with_sources = f"with {len(sources)} source images, " if sources else ""
    cause = f"{with_sources}takes {tokens} tokens, the AR model has {context}"
    return PriorError(400, "size {}x{}".format(*size), cause)


def _tokenize(processor: Any, prompt: str, images: list[Image.Image], height: int, width: int):
    content = [{"type": "image", "image": image} for image in images]
    content.append({"type": "text", "text": prompt})
    return processor.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=True,
        target_h=height,
        target_w=width,
        return_dict=True,
        return_tensors="pt",
    )


def _fitted_size(image: Image.Image, processor: Any, index: int) -> tuple[int, int]:
    try:
        return source_size(image.size, processor.image_processor)
    except ValueError as error:
        raise PriorError(400, f"source image {index}", str(error)) from None


def read_encoded(source: str, index: int) -> bytes:
    """The bytes of an image file, from a path, an ``http`` address, a data URL or base64."""
    from sglang.srt.utils import get_image_bytes

    try:
        return Path(source).read_bytes() if os.path.isfile(source) else get_image_bytes(source)
    except (OSError, ValueError) as error:
        cause = f"cannot be read: {str(error)[:_MAX_SHOWN]}"
        raise PriorError(400, f"source image {index}", cause) from None


def decode(encoded: bytes, index: int) -> Image.Image:
    """RGB and upright, as upstream's own stage sees it."""
    try:
        image = Image.open(io.BytesIO(encoded))
        check_pixels(image)
        return load_image(image)
    except UnidentifiedImageError:  # its text is an address in memory
        raise PriorError(400, f"source image {index}", "not an image of a known format") from None
    except _NOT_AN_IMAGE as error:
        raise PriorError(400, f"source image {index}", f"not an image: {error}") from None

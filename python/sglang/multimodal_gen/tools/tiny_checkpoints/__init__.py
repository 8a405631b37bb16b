# SPDX-License-Identifier: Apache-2.0
"""Tiny random-weight checkpoints that stock SGLang-Diffusion serves.

Diffusers layout, built offline in seconds, a few MB each: the real pipelines run end to end on a
CPU, so a server can be tested without downloading a model. The pictures mean nothing, but prompt,
seed and guidance scale all change them. A family's weights are the same on every build.

Command line: ``python -m sglang.multimodal_gen.tools.tiny_checkpoints FAMILY DIR [--full-dit]``.
"""

import importlib
import os
import tempfile
from pathlib import Path

__all__ = ["FAMILIES", "build_checkpoint"]

FAMILIES = ("glm-image", "sd3-medium", "qwen-image", "sana")

# SGLang tells SANA by the class in model_index.json, and these by a word in the path.
_KNOWN_BY_NAME = ("glm-image", "sd3-medium", "qwen-image")


def build_checkpoint(
    family: str, directory: str | os.PathLike, *, full_dit: bool = False
) -> Path:
    """Build `family`'s checkpoint in `directory` and return its path.

    `directory` must not exist, or be empty; it appears complete or not at all. Its name must
    contain the family's for SGLang to recognise it (any name will do for sana). `full_dit`
    (glm-image only) gives the checkpoint the real 6.93B-parameter DiT: 14 GB, needs a GPU.

    Raises ValueError for an argument that cannot be served, FileExistsError for a directory
    in use, RuntimeError for `full_dit` without a GPU.
    """
    target = Path(os.path.abspath(directory))
    _check(family, target, full_dit)

    # Here, so that importing this package costs nothing: the builders load torch and diffusers.
    builder = importlib.import_module("." + family.replace("-", "_"), __package__)
    options = {"full_dit": True} if full_dit else {}

    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, hence on its file system, where moving is atomic.
    with tempfile.TemporaryDirectory(prefix=".tiny-ckpt-", dir=target.parent) as scratch:
        staging = Path(scratch, "checkpoint")
        staging.mkdir()
        builder.build(staging, **options)
        staging.replace(target)
    return target


def _check(family: str, target: Path, full_dit: bool) -> None:
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}; choose from {', '.join(FAMILIES)}")
    if full_dit and family != "glm-image":
        raise ValueError(f"the full-size DiT exists for glm-image only, not for {family}")
    if family in _KNOWN_BY_NAME and family not in target.name.lower():
        raise ValueError(
            f"the directory's name must contain {family!r}, by which SGLang recognises the "
            f"family; got {target.name!r}"
        )
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise FileExistsError(f"{target} exists and is not an empty directory")
    if full_dit:
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("the full-size DiT is made on a GPU and torch sees none")

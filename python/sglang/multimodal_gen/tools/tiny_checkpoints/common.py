# SPDX-License-Identifier: Apache-2.0
"""What the families share: reproducible random weights and the diffusers layout on disk."""

import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
from tokenizers import pre_tokenizers

# Libraries start matrices small (0.02), which at these widths leaves every prompt and scale with
# nearly the same picture. At 0.08 a 64- to 128-wide layer keeps its input's size.
MATRIX_STD = 0.08
# For DiTs whose text shares one attention with the image tokens and sways them little: changing
# the prompt or dropping CFG moves a pixel by 5 to 31 of 255 instead of 1 to 6.
JOINT_DIT_STD = 0.12


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for the bytes in byte-level BPE, in a fixed order."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


@contextmanager
def reproducible(seed: int, dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Seeded randomness and a known default dtype inside; the caller's own state back after."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    caller_dtype = torch.get_default_dtype()
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(caller_dtype)


class CheckpointWriter:
    """Writes components under `root`, one folder each, and `model_index.json` at the end."""

    def __init__(self, root: Path, pipeline_class: str) -> None:
        self.root = root
        self._index: dict[str, Any] = {
            "_class_name": pipeline_class,
            "_diffusers_version": diffusers.__version__,
        }

    def add(self, name: str, component: Any) -> None:
        """Save a component that holds no weights: tokenizer, processor or scheduler."""
        component.save_pretrained(self.root / name)
        library = type(component).__module__.partition(".")[0]
        self._index[name] = [library, type(component).__name__]

    def add_model(
        self,
        name: str,
        make: Callable[[], torch.nn.Module],
        *,
        std: float | None = MATRIX_STD,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Save the model that `make` returns, its matrices drawn anew with deviation `std`.

        None keeps the library's own initialisation. Vectors (norms, biases) keep it always. The
        seed is the component's name, so no component's weights depend on what was built before.
        """
        with reproducible(zlib.crc32(name.encode()), dtype):
            model = make().eval()
            if std is not None:
                with torch.no_grad():
                    for parameter in model.parameters():
                        if parameter.dim() >= 2:
                            parameter.normal_(0, std)
            self.add(name, model)

    def finish(self) -> None:
        """Write `model_index.json`, which names every component added."""
        text = json.dumps(dict(sorted(self._index.items())), indent=2) + "\n"
        (self.root / "model_index.json").write_text(text)


def small_kl_vae(**settings: Any) -> diffusers.AutoencoderKL:
    """The 8x, 16-channel KL autoencoder of SD3 and GLM-Image, at 16 to 32 channels inside."""
    return diffusers.AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=16,
        layers_per_block=1,
        block_out_channels=(16, 16, 32, 32),
        norm_num_groups=8,
        sample_size=128,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        force_upcast=False,
        **settings,
    )

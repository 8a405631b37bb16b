# SPDX-License-Identifier: Apache-2.0
"""GLM-Image's AR model, with source images as transformers sees them, giving back their tokens.

For image-to-image the DiT is conditioned on the codes of each source image too. The AR model makes
them anyway, to embed them: here they also go out with the answer, in `customized_info`. Upstream's
vision encoder leaves the weights of its MLPs unloaded and takes SiLU for the checkpoint's GELU.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.activations import ACT2FN

from sglang.multimodal_gen.configs.glm_image_prior import SOURCE_TOKENS_KEY
from sglang.srt.managers.schedule_batch import MultimodalDataItem, MultimodalInputs
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.glm_image_vl import (
    GlmImageForConditionalGeneration,
    GlmImageVQVAE,
)

_MAX_ITEMS = 1024  # about 1 KB a source image of 1024 x 1024 pixels


class GlmImageWithSourceTokens(GlmImageForConditionalGeneration):
    """Takes upstream's place for the same architecture."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        for block in self.visual.blocks:
            block.mlp.act = ACT2FN[config.vision_config.hidden_act]
        # by the hash of their item: SRT's caches may leave out the vision encoder
        self._codes: OrderedDict[int, list[list[int]]] = OrderedDict()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights((_renamed(name), weight) for name, weight in weights)

    def get_image_feature(self, items: list[MultimodalDataItem]) -> torch.Tensor:
        """Upstream's embeddings; the codes of each image are kept on the way."""
        with _recorded(self.vqvae) as codes:
            embeddings = super().get_image_feature(items)
        remaining = iter(codes)
        for item in items:
            self._remember(item.hash, [next(remaining).tolist() for _ in item.image_grid_thw])
        return embeddings

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> Any:
        mm_inputs = forward_batch.mm_inputs  # upstream drops it
        output = super().forward(input_ids, positions, forward_batch)
        if mm_inputs is not None and forward_batch.forward_mode.is_extend():
            sources = [self._source_codes(inputs) for inputs in mm_inputs]
            if any(sources):
                output.customized_info = {SOURCE_TOKENS_KEY: sources}
        return output

    def _source_codes(self, inputs: MultimodalInputs | None) -> list[list[int]] | None:
        """Of one request, a list of codes a source image; None without one."""
        items = [item for item in inputs.mm_items if item.is_image()] if inputs else []
        return [codes for item in items for codes in self._codes_of(item)] or None

    def _codes_of(self, item: MultimodalDataItem) -> list[list[int]]:
        if item.hash not in self._codes:  # all of its prompt was cached
            item.feature = item.feature.to(self.visual.device)
            self.get_image_feature([item])
        return self._codes[item.hash]

    def _remember(self, key: int, codes: list[list[int]]) -> None:
        self._codes[key] = codes
        self._codes.move_to_end(key)
        if len(self._codes) > _MAX_ITEMS:
            self._codes.popitem(last=False)


@contextmanager
def _recorded(vqvae: GlmImageVQVAE) -> Iterator[list[torch.Tensor]]:
    """What `vqvae.encode` returns meanwhile, in order."""
    codes: list[torch.Tensor] = []

    def encode(hidden_BCHW: torch.Tensor) -> torch.Tensor:
        codes.append(GlmImageVQVAE.encode(vqvae, hidden_BCHW))
        return codes[-1]

    vqvae.encode = encode
    try:
        yield codes
    finally:
        del vqvae.encode


def _renamed(name: str) -> str:
    return name.replace(".mlp.fc", ".mlp.linear_fc") if ".visual." in name else name

# SPDX-License-Identifier: Apache-2.0
"""How the checkpoint wants the AR model's ids to be drawn."""

from transformers import GenerationConfig

# what transformers' `generate` takes where a checkpoint names nothing
_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 50}
_ALL_IDS = -1  # top_k of SRT; transformers says 0


def sampling_of(model_path: str) -> dict[str, float]:
    """Sampling parameters of SRT that draw as ``generate`` of the AR model in one process does.

    Args:
        model_path: of the whole checkpoint, a folder or a name on the hub.
    """
    try:
        config = GenerationConfig.from_pretrained(model_path, subfolder="vision_language_encoder")
    except OSError:  # it has none
        config = GenerationConfig()
    given = {name: getattr(config, name) for name in (*_DEFAULTS, "min_p")}
    sampling = _DEFAULTS | {name: value for name, value in given.items() if value is not None}
    return sampling | {"top_k": sampling["top_k"] or _ALL_IDS}

# SPDX-License-Identifier: Apache-2.0
"""How the checkpoint wants the AR model's ids to be drawn."""

from transformers import GenerationConfig

from sglang.multimodal_gen.runtime.utils.logging_utils import init_logger

logger = init_logger(__name__)

# what transformers' `generate` takes where a checkpoint names nothing
_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 50}
_ALL_IDS = -1  # top_k of SRT; transformers says 0

# SRT has none of these, or not with seeds; by value that changes nothing
_NOT_SENT = {
    **{"min_p": 0, "epsilon_cutoff": 0, "eta_cutoff": 0, "no_repeat_ngram_size": 0},
    **{"typical_p": 1, "repetition_penalty": 1},
}


def sampling_of(model_path: str) -> dict[str, float]:
    """Sampling parameters of SRT that draw as ``generate`` of the AR model in one process does.

    Args:
        model_path: of the whole checkpoint, a folder or a name on the hub.
    """
    try:
        config = GenerationConfig.from_pretrained(model_path, subfolder="vision_language_encoder")
    except OSError as error:
        logger.warning("The AR model's generation_config.json cannot be read: %s", error)
        config = GenerationConfig()
    given = {name: getattr(config, name) for name in _DEFAULTS}
    sampling = _DEFAULTS | {name: value for name, value in given.items() if value is not None}
    sampling["top_k"] = sampling["top_k"] or _ALL_IDS
    logger.info("The AR server is asked to draw ids with %s", sampling)
    for name, neutral in _NOT_SENT.items():
        if getattr(config, name, None) not in (None, neutral):
            logger.warning(
                "The AR model's generation_config.json has %s=%s, which an AR server is not sent",
                name,
                getattr(config, name),
            )
    return sampling

# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image: Qwen2.5-VL (64 wide, two layers), two DiT blocks (128 wide), 3D-conv VAE."""

import json
from pathlib import Path

from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageTransformer2DModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from sglang.multimodal_gen.tools.tiny_checkpoints.common import (
    JOINT_DIT_STD,
    CheckpointWriter,
    byte_alphabet,
)

TEXT_WIDTH = 64
END = "<|endoftext|>"
SPECIAL = (
    END,
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# The words that the pipeline puts around every prompt.
TEMPLATE = (
    "system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background: user\n assistant\n"
)


def make_tokenizer() -> Qwen2Tokenizer:
    """Byte-level BPE that makes the template's prefix 34 tokens long, as the real one does.

    The pipeline cuts off the first 34 tokens whatever they are: with one token a byte, that
    would leave most of the template in front of the prompt.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # Twice, since a pair must be seen two times; 700 is more than the template can fill.
    trainer = trainers.BpeTrainer(
        vocab_size=700, min_frequency=2, show_progress=False, initial_alphabet=byte_alphabet()
    )
    bpe.train_from_iterator([TEMPLATE] * 2, trainer)
    trained = json.loads(bpe.to_str())["model"]
    vocab = trained["vocab"]
    for token in SPECIAL:
        vocab[token] = len(vocab)
    return Qwen2Tokenizer(
        vocab=vocab,
        merges=[tuple(pair) for pair in trained["merges"]],
        model_max_length=4096,
        extra_special_tokens=list(SPECIAL[1:]),
    )


def build(root: Path) -> None:
    writer = CheckpointWriter(root, "QwenImagePipeline")
    tokenizer = make_tokenizer()
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    writer.add("tokenizer", tokenizer)

    text_config = dict(
        vocab_size=-(-len(tokenizer) // 64) * 64,  # tensor parallelism pads to 64
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=ids[END],
        eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids[END],
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 3, 3]),
    )
    # Text to image never runs the vision tower, but the class cannot be loaded without one.
    vision_config = dict(
        depth=1,
        hidden_size=32,
        intermediate_size=64,
        num_heads=2,
        out_hidden_size=TEXT_WIDTH,
        fullatt_block_indexes=[0],
    )
    writer.add_model(
        "text_encoder",
        lambda: Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(
                text_config=text_config,
                vision_config=vision_config,
                image_token_id=ids["<|image_pad|>"],
                video_token_id=ids["<|video_pad|>"],
                vision_start_token_id=ids["<|vision_start|>"],
                vision_end_token_id=ids["<|vision_end|>"],
            )
        ),
    )

    writer.add_model(
        "transformer",
        lambda: QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=64,  # 16 latent channels, packed 2 x 2
            out_channels=16,
            num_layers=2,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=TEXT_WIDTH,
            axes_dims_rope=(8, 12, 12),
        ),
        std=JOINT_DIT_STD,
    )
    # Only 8 channels and causal 3D kernels that meet zeros in time: weaker weights come out grey.
    writer.add_model(
        "vae",
        lambda: AutoencoderKLQwenImage(
            base_dim=8, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=1
        ),
        std=0.4,
    )
    writer.add(
        "scheduler",
        FlowMatchEulerDiscreteScheduler(
            num_train_timesteps=1000,
            shift=1.0,
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=0.9,
            base_image_seq_len=256,
            max_image_seq_len=8192,
            shift_terminal=0.02,
            time_shift_type="exponential",
        ),
    )
    writer.finish()

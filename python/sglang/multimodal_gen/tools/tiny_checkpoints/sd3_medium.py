# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion 3: two CLIP encoders (32 wide), T5 (64), two MMDiT blocks (64), KL VAE.

The widths repeat the real model's sums: the pooled CLIP vectors side by side (32 + 32) feed
`pooled_projection_dim`, and T5's width is `joint_attention_dim`.
"""

from pathlib import Path

from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from sglang.multimodal_gen.tools.tiny_checkpoints.common import (
    JOINT_DIT_STD,
    CheckpointWriter,
    byte_alphabet,
    small_kl_vae,
)

CLIP_WIDTH = 32
T5_WIDTH = 64
BOS, EOS = "<|startoftext|>", "<|endoftext|>"


def build(root: Path) -> None:
    writer = CheckpointWriter(root, "StableDiffusion3Pipeline")

    # Every byte inside a word and at its end, as CLIP has them, and no merges.
    letters = byte_alphabet()
    words = letters + [letter + "</w>" for letter in letters] + [BOS, EOS]
    clip_vocab = {word: index for index, word in enumerate(words)}
    # The second CLIP of SD3 pads with "!", the first with its end token, hence the pair.
    for name, pad, activation in (("", EOS, "quick_gelu"), ("_2", "!", "gelu")):
        writer.add(
            f"tokenizer{name}",
            CLIPTokenizer(vocab=clip_vocab, merges=[], pad_token=pad, model_max_length=77),
        )
        config = CLIPTextConfig(
            vocab_size=len(clip_vocab),
            hidden_size=CLIP_WIDTH,
            intermediate_size=2 * CLIP_WIDTH,
            projection_dim=CLIP_WIDTH,
            num_hidden_layers=3,  # the last but one is the one SD3 reads
            num_attention_heads=2,
            max_position_embeddings=77,
            hidden_act=activation,
            bos_token_id=clip_vocab[BOS],
            eos_token_id=clip_vocab[EOS],
            pad_token_id=clip_vocab[EOS],
        )
        writer.add_model(f"text_encoder{name}", lambda: CLIPTextModelWithProjection(config))

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    pieces += [(chr(code), -3.0) for code in range(33, 127)]
    writer.add("tokenizer_3", T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=512))
    writer.add_model(
        "text_encoder_3",
        lambda: T5EncoderModel(
            T5Config(
                vocab_size=128,
                d_model=T5_WIDTH,
                d_kv=16,
                d_ff=2 * T5_WIDTH,
                num_layers=2,
                num_heads=4,
                feed_forward_proj="gated-gelu",
                tie_word_embeddings=False,
            )
        ),
    )

    writer.add_model(
        "transformer",
        lambda: SD3Transformer2DModel(
            sample_size=32,
            patch_size=2,
            in_channels=16,
            out_channels=16,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=T5_WIDTH,
            caption_projection_dim=64,
            pooled_projection_dim=2 * CLIP_WIDTH,
            pos_embed_max_size=32,  # 512 x 512 pixels at most
            dual_attention_layers=(),
            qk_norm="rms_norm",
        ),
        std=JOINT_DIT_STD,
    )
    writer.add_model("vae", lambda: small_kl_vae(scaling_factor=1.5305, shift_factor=0.0609))
    writer.add("scheduler", FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=3.0))
    writer.finish()

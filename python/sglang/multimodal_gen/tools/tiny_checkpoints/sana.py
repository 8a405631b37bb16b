# SPDX-License-Identifier: Apache-2.0
"""SANA: Gemma2 (64 wide, two layers), two linear-attention blocks (64 wide), DC-AE.

The autoencoder keeps the real one's six stages, 32x compression and 32 channels, since SGLang
takes the two numbers from its own configuration: a 64 x 64 image is 2 x 2 latents.
"""

from pathlib import Path

from diffusers import AutoencoderDC, DPMSolverMultistepScheduler, SanaTransformer2DModel
from transformers import Gemma2Config, Gemma2Model, GemmaTokenizer

from sglang.multimodal_gen.tools.tiny_checkpoints.common import CheckpointWriter

WIDTH = 64
HEADS, HEAD_WIDTH = 4, 16
LATENT_CHANNELS = 32


def make_tokenizer() -> GemmaTokenizer:
    """Printable ASCII a character at a time, anything else by its UTF-8 bytes."""
    words = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    words += [f"<0x{byte:02X}>" for byte in range(256)]
    words += ["\u2581"] + [chr(code) for code in range(33, 127)]
    vocab = {word: index for index, word in enumerate(words)}
    # Without <bos> an empty negative prompt would be no token at all, which nothing can encode.
    return GemmaTokenizer(vocab=vocab, merges=[], add_bos_token=True, model_max_length=8192)


def build(root: Path) -> None:
    writer = CheckpointWriter(root, "SanaPipeline")
    tokenizer = make_tokenizer()
    writer.add("tokenizer", tokenizer)
    writer.add_model(
        "text_encoder",
        lambda: Gemma2Model(
            Gemma2Config(
                vocab_size=-(-len(tokenizer) // 64) * 64,
                hidden_size=WIDTH,
                intermediate_size=2 * WIDTH,
                num_hidden_layers=2,
                num_attention_heads=HEADS,
                num_key_value_heads=2,
                head_dim=HEAD_WIDTH,
                query_pre_attn_scalar=HEAD_WIDTH,
                # SGLang does not cap; without a cap here diffusers gives the same embeddings.
                attn_logit_softcapping=None,
                max_position_embeddings=8192,
            )
        ),
    )

    writer.add_model(
        "transformer",
        lambda: SanaTransformer2DModel(
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            num_attention_heads=HEADS,
            attention_head_dim=HEAD_WIDTH,
            num_layers=2,
            num_cross_attention_heads=HEADS,
            cross_attention_head_dim=HEAD_WIDTH,
            cross_attention_dim=WIDTH,
            caption_channels=WIDTH,
            mlp_ratio=2.5,
            sample_size=32,
        ),
    )

    stages = dict(
        block_types=("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
        block_out_channels=(8, 8, 16, 16, 32, 32),
        layers_per_block=(1,) * 6,
        qkv_multiscales=((),) * 3 + ((5,),) * 3,
    )
    writer.add_model(
        "vae",
        lambda: AutoencoderDC(
            latent_channels=LATENT_CHANNELS,
            attention_head_dim=8,
            **{f"{half}_{key}": v for half in ("encoder", "decoder") for key, v in stages.items()},
            downsample_block_type="conv",
            upsample_block_type="interpolate",
            scaling_factor=0.41407,
        ),
    )
    # As published with SANA 1.5: a second-order multistep solver, unlike the other families'.
    writer.add(
        "scheduler",
        DPMSolverMultistepScheduler(
            num_train_timesteps=1000,
            beta_schedule="linear",
            solver_order=2,
            algorithm_type="dpmsolver++",
            solver_type="midpoint",
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            flow_shift=3.0,
            final_sigmas_type="zero",
        ),
    )
    writer.finish()

# SPDX-License-Identifier: Apache-2.0
"""GLM-Image: AR model (128 wide, two layers), ByT5 glyph encoder, two DiT blocks, KL VAE.

The AR model draws codes of a 128-entry codebook (real: 16384), and its text tokens begin right
after the image tokens, in the real order. `full_dit` swaps in the real DiT: 30 blocks of 32 heads
x 128, 6.93B parameters, beside the same tiny AR model and VAE.
"""

from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, GlmImageTransformer2DModel
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    ByT5Tokenizer,
    GlmImageConfig,
    GlmImageForConditionalGeneration,
    GlmImageProcessor,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)
from transformers.models.glm_image.image_processing_glm_image import GlmImageImageProcessor

from sglang.multimodal_gen.tools.tiny_checkpoints.common import (
    JOINT_DIT_STD,
    CheckpointWriter,
    byte_alphabet,
    small_kl_vae,
)

CODES = 128
IMAGE_START, IMAGE_END = CODES, CODES + 1
FIRST_TEXT_ID = CODES + 32

PAD, IMAGE, GRID_START, GRID_END = "<|endoftext|>", "<|image|>", "<sop>", "<eop>"
SPECIAL = (
    PAD,
    "[gMASK]",
    GRID_START,
    GRID_END,
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    IMAGE,
)


def image_token(code: int) -> str:
    return f"<|dit_token_{code}|>"


# A source image is one IMAGE token between the start and end ids; the processor repeats it.
CHAT_TEMPLATE = (
    "[gMASK]<sop>"
    "{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}"
    + image_token(IMAGE_START)
    + IMAGE
    + image_token(IMAGE_END)
    + "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Image codes, image start and end, spares up to FIRST_TEXT_ID, bytes, special tokens."""
    image_tokens = [image_token(code) for code in range(FIRST_TEXT_ID)]
    words = image_tokens + byte_alphabet() + list(SPECIAL)
    vocab = {word: index for index, word in enumerate(words)}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(
        [AddedToken(word, special=True, normalized=False) for word in image_tokens + list(SPECIAL)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=image_token(IMAGE_START),
        eos_token=image_token(IMAGE_END),
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=131072,
        extra_special_tokens={
            "image_token": IMAGE,
            "grid_bos_token": GRID_START,
            "grid_eos_token": GRID_END,
        },
    )


def make_ar_model(tokenizer: PreTrainedTokenizerFast) -> GlmImageForConditionalGeneration:
    pad = tokenizer.pad_token_id
    model = GlmImageForConditionalGeneration(
        GlmImageConfig(
            text_config=dict(
                vocab_size=len(tokenizer),
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=8192,
                vision_vocab_size=CODES,
                pad_token_id=pad,
                eos_token_id=IMAGE_END,
                rope_parameters=dict(
                    rope_type="default",
                    rope_theta=10000.0,
                    partial_rotary_factor=0.5,
                    mrope_section=[2, 3, 3],
                ),
            ),
            vision_config=dict(
                depth=1,
                hidden_size=64,
                num_heads=2,
                intermediate_size=128,
                image_size=256,
                patch_size=16,
            ),
            vq_config=dict(embed_dim=32, num_embeddings=CODES, latent_channels=64),
            image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
            image_start_token_id=IMAGE_START,
            image_end_token_id=IMAGE_END,
        )
    )
    model.generation_config.do_sample = True
    model.generation_config.eos_token_id = IMAGE_END
    model.generation_config.pad_token_id = pad
    return model


def tiny_dit(text_width: int) -> GlmImageTransformer2DModel:
    return GlmImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=2,
        attention_head_dim=32,
        num_attention_heads=4,
        text_embed_dim=text_width,
        time_embed_dim=64,
        condition_dim=32,
        prior_vq_quantizer_codebook_size=CODES,
    )


def real_dit(text_width: int) -> GlmImageTransformer2DModel:
    with torch.device("cuda"):  # a minute of random numbers there, far more on a CPU
        return GlmImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=16,
            num_layers=30,
            attention_head_dim=128,
            num_attention_heads=32,
            text_embed_dim=text_width,
            time_embed_dim=512,
            condition_dim=256,
            prior_vq_quantizer_codebook_size=16384,
        )


def build(root: Path, full_dit: bool = False) -> None:
    writer = CheckpointWriter(root, "GlmImagePipeline")

    tokenizer = make_tokenizer()
    image_processor = GlmImageImageProcessor(
        patch_size=16,
        temporal_patch_size=1,
        merge_size=1,
        size={"shortest_edge": 64 * 64, "longest_edge": 2048 * 2048},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    processor = GlmImageProcessor(
        image_processor=image_processor, tokenizer=tokenizer, chat_template=CHAT_TEMPLATE
    )
    writer.add("processor", processor)
    writer.add_model("vision_language_encoder", lambda: make_ar_model(tokenizer))

    text_width = 1472 if full_dit else 64
    writer.add("tokenizer", ByT5Tokenizer())
    writer.add_model(
        "text_encoder",
        lambda: T5EncoderModel(
            T5Config(
                vocab_size=384,
                d_model=text_width,
                d_kv=16,
                d_ff=128,
                num_layers=2,
                num_heads=6,
                feed_forward_proj="gated-gelu",
                tie_word_embeddings=False,
                pad_token_id=0,
                eos_token_id=1,
                decoder_start_token_id=0,
            )
        ),
    )

    writer.add_model(
        "transformer",
        lambda: (real_dit if full_dit else tiny_dit)(text_width),
        # 4096 wide, such matrices would blow up; torch's own start suits that width.
        std=None if full_dit else JOINT_DIT_STD,
        dtype=torch.bfloat16 if full_dit else torch.float32,
    )
    writer.add_model(
        "vae",
        lambda: small_kl_vae(
            mid_block_add_attention=False,
            # Neither zeros nor ones, so that forgetting to apply them shows.
            latents_mean=[0.01 * i for i in range(16)],
            latents_std=[1.0 + 0.05 * i for i in range(16)],
            scaling_factor=1.0,
            shift_factor=None,
        ),
    )
    writer.add(
        "scheduler",
        FlowMatchEulerDiscreteScheduler(
            num_train_timesteps=1000,
            shift=1.0,
            use_dynamic_shifting=True,
            base_shift=0.25,
            max_shift=0.75,
            base_image_seq_len=256,
            max_image_seq_len=4096,
            time_shift_type="linear",
        ),
    )
    writer.finish()

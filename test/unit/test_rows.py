"""Which rows share a forward, and how their conditioning is stacked."""

from types import SimpleNamespace

import pytest
import torch

from sglang.multimodal_gen.runtime.guidance.rows import (
    MASKED_ROWS_MAX_IMAGE_TOKENS,
    ROW_ADAPTERS,
    build_row_adapter,
    rows_pack,
)


@pytest.mark.parametrize(
    ("mode", "refusal", "masked", "image_tokens", "packs"),
    [
        ("auto", None, False, 16, True),
        ("auto", None, False, 10**6, True),
        ("auto", None, True, MASKED_ROWS_MAX_IMAGE_TOKENS, True),
        ("auto", None, True, MASKED_ROWS_MAX_IMAGE_TOKENS + 1, False),
        ("packed", None, True, 10**6, True),
        ("split", None, False, 16, False),
        ("packed", "a reason", False, 16, False),
        ("auto", "a reason", False, 16, False),
    ],
)
def test_rows_pack(mode, refusal, masked, image_tokens, packs):
    assert rows_pack(mode, refusal=refusal, masked=masked, image_tokens=image_tokens) is packs


def test_a_family_without_an_adapter():
    assert build_row_adapter(torch.nn.Linear(1, 1)) is None


def adapter(name):
    cls = ROW_ADAPTERS[name]
    made = cls.__new__(cls)
    made.dit = SimpleNamespace(zero_cond_t=False)  # all that stacking asks of the DiT
    return made


def glm_group(length: int, images: int = 1, drop: bool = False, **extra):
    return {
        "encoder_hidden_states": [torch.ones(images, length, 4)],
        "prior_token_id": torch.arange(images * 6).reshape(images, 6),
        "prior_token_drop": torch.full((images, 6), drop),
        "target_size": torch.tensor([[64, 64]] * images),
        "crop_coords": torch.zeros(images, 2),
        "freqs_cis": (torch.ones(6, 2), torch.ones(6, 2)),
        **extra,
    }


def test_glm_rows_of_one_length_need_no_mask():
    glm = adapter("GlmImageTransformer2DModel")
    groups = [glm_group(2, images=3, drop=True), glm_group(2, images=3)]
    assert glm.refusal(groups) is None
    assert not glm.needs_mask(groups)
    packed = glm.pack(groups)
    assert packed.mask_BL is None
    assert packed.kwargs["encoder_hidden_states"].shape == (6, 2, 4)
    assert packed.kwargs["prior_token_drop"].all(dim=1).tolist() == [True] * 3 + [False] * 3


def test_glm_rows_of_two_lengths_are_padded_and_masked():
    glm = adapter("GlmImageTransformer2DModel")
    packed = glm.pack([glm_group(2), glm_group(5)])
    text_BLD = packed.kwargs["encoder_hidden_states"]
    assert packed.mask_BL.tolist() == [[True] * 2 + [False] * 3, [True] * 5]
    assert torch.equal(text_BLD[..., 0].bool(), packed.mask_BL)
    keys_BS = glm._with_image_keys(packed)
    assert keys_BS.shape == (2, 5 + 6)
    assert keys_BS[:, 5:].all()


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"kv_caches": object(), "kv_caches_mode": "read"}, "key/value cache"),
        ({"controlnet": torch.ones(1)}, "controlnet"),
    ],
    ids=["image-to-image", "unknown conditioning"],
)
def test_glm_rows_that_cannot_be_packed(extra, reason):
    glm = adapter("GlmImageTransformer2DModel")
    assert reason in glm.refusal([glm_group(2), glm_group(2, **extra)])


def qwen_group(length: int, mask=None):
    freqs = (torch.ones(6, 2), torch.full((length, 2), float(length)))
    return {
        "encoder_hidden_states": [torch.ones(1, length, 4)],
        "encoder_hidden_states_mask": mask,
        "txt_seq_lens": [length],
        "img_shapes": [[(1, 2, 3)]],
        "freqs_cis": freqs,
        "freqs_complex": freqs,
    }


def test_qwen_rows_take_the_longest_texts_rotary_cache():
    qwen = adapter("QwenImageTransformer2DModel")
    for order in ([3, 5], [5, 3]):
        packed = qwen.pack([qwen_group(length) for length in order])
        assert packed.kwargs["txt_seq_lens"] == order
        assert packed.kwargs["img_shapes"] == [[(1, 2, 3)]] * 2
        assert packed.kwargs["freqs_cis"][1].shape == (5, 2)
        assert packed.kwargs["encoder_hidden_states_mask"].sum(dim=1).tolist() == order


def test_qwen_edit_rows_with_a_zero_timestep_are_not_packed():
    qwen = adapter("QwenImageTransformer2DModel")
    qwen.dit.zero_cond_t = True
    assert "zero timestep" in qwen.refusal([qwen_group(3), qwen_group(3)])


def test_source_tokens_count():
    qwen = adapter("QwenImageTransformer2DModel")
    latents, source = torch.zeros(1, 1024, 4), torch.zeros(1, 4000, 4)
    assert qwen.image_tokens(latents) == 1024
    assert qwen.image_tokens(latents, source) == 5024


def test_a_wrapped_dit_keeps_its_adapter():
    sd3 = type("SD3Transformer2DModel", (torch.nn.Module,), {})
    wrapped = type("FSDPSD3Transformer2DModel", (sd3,), {})
    assert build_row_adapter(wrapped()).dit_class == "SD3Transformer2DModel"


def test_qwen_rows_keep_the_masks_that_they_have():
    qwen = adapter("QwenImageTransformer2DModel")
    masks = [[torch.tensor([[1, 1, 0]])], [torch.tensor([[1, 1, 1]])]]
    packed = qwen.pack([qwen_group(3, mask) for mask in masks])
    assert packed.kwargs["encoder_hidden_states_mask"].tolist() == [[True, True, False], [True] * 3]
    assert qwen.pack([qwen_group(3), qwen_group(3)]).kwargs["encoder_hidden_states_mask"] is None

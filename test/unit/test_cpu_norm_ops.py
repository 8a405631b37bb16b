"""The two norms against the native path of the layers that call them."""

import pytest
import torch

from sglang.multimodal_gen.runtime.layers import cpu_norm_ops


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    residual, x = torch.randn(2, 2, 5, 16, generator=generator)
    gate, scale, shift = torch.randn(3, 2, 1, 16, generator=generator)
    return residual, x, gate, scale, shift


def test_layer_norm(tensors):
    residual, x, gate, scale, shift = tensors
    modulated, summed = cpu_norm_ops.fused_scale_residual_norm_scale_shift_cpu(
        residual, x, gate, None, None, scale, shift, "layer", 1e-5
    )
    assert torch.equal(summed, residual + x * gate)
    normalized = (summed - summed.mean(-1, keepdim=True)) / (
        summed.var(-1, correction=0, keepdim=True) + 1e-5
    ).sqrt()
    assert torch.allclose(modulated, normalized * (1 + scale) + shift, atol=1e-5)


def test_rms_norm(tensors):
    _, x, _, scale, shift = tensors
    weight = torch.arange(16.0)
    got = cpu_norm_ops.fused_norm_scale_shift_cpu(
        x.bfloat16(), weight, None, scale, shift, "rms", 1e-6
    )
    rounded = x.bfloat16().float()
    normalized = rounded / rounded.square().mean(-1, keepdim=True).sqrt()
    assert torch.allclose(got, (normalized * weight) * (1 + scale) + shift, rtol=2e-2, atol=0.1)


def test_without_a_gate(tensors):
    residual, x, _, scale, shift = tensors
    _, summed = cpu_norm_ops.fused_scale_residual_norm_scale_shift_cpu(
        residual, x, None, None, None, scale, shift, "layer", 1e-5
    )
    assert torch.equal(summed, residual + x)


def test_an_op_that_is_there_is_kept():
    cpu_norm_ops.register_missing_ops()
    assert cpu_norm_ops.register_missing_ops() == []
    assert torch.ops.sgl_kernel.fused_norm_scale_shift_cpu is not None

# SPDX-License-Identifier: Apache-2.0
"""Plain torch versions of two fused norm ops, for hosts whose wheel has no CPU build of them.

``runtime/layers/layernorm.py`` calls both through ``torch.ops.sgl_kernel`` on CPU platforms; the
published wheels carry the CUDA build only. Everything is elementwise in the dtype of the
activations, with the norm itself in fp32, as the native path of the same layers does.
"""

import torch
import torch.nn.functional as F

_NAMESPACE = "sgl_kernel"


def _norm(
    x_BSD: torch.Tensor,
    weight_D: torch.Tensor | None,
    bias_D: torch.Tensor | None,
    norm_type: str,
    eps: float,
) -> torch.Tensor:
    weight_D = None if weight_D is None else weight_D.float()
    if norm_type == "rms":
        return F.rms_norm(x_BSD.float(), x_BSD.shape[-1:], weight_D, eps).to(x_BSD.dtype)
    bias_D = None if bias_D is None else bias_D.float()
    return F.layer_norm(x_BSD.float(), x_BSD.shape[-1:], weight_D, bias_D, eps).to(x_BSD.dtype)


def fused_norm_scale_shift_cpu(x_BSD, weight_D, bias_D, scale, shift, norm_type, eps):
    """``norm(x) * (1 + scale) + shift``; `scale` and `shift` broadcast against `x_BSD`."""
    return _norm(x_BSD, weight_D, bias_D, norm_type, eps) * (1 + scale) + shift


def fused_scale_residual_norm_scale_shift_cpu(
    residual_BSD, x_BSD, gate, weight_D, bias_D, scale, shift, norm_type, eps
):
    """``r = residual + x * gate`` and ``norm(r) * (1 + scale) + shift``; returns the latter, r."""
    r_BSD = residual_BSD + (x_BSD if gate is None else x_BSD * gate)
    modulated = fused_norm_scale_shift_cpu(r_BSD, weight_D, bias_D, scale, shift, norm_type, eps)
    return modulated, r_BSD


_SCHEMAS = {
    fused_norm_scale_shift_cpu: (
        "(Tensor x, Tensor? weight, Tensor? bias, Tensor scale, Tensor shift, "
        "str norm_type, float eps) -> Tensor"
    ),
    fused_scale_residual_norm_scale_shift_cpu: (
        "(Tensor residual, Tensor x, Tensor? gate, Tensor? weight, Tensor? bias, Tensor scale, "
        "Tensor shift, str norm_type, float eps) -> (Tensor, Tensor)"
    ),
}
# A fragment lives as long as the object that made it.
_library: torch.library.Library | None = None


def register_missing_ops() -> list[str]:
    """Register those of the two ops that this host lacks; returns their names.

    Call it after ``sgl_kernel`` was imported (or failed to be): a build that has the ops keeps
    its own.
    """
    global _library
    missing = [op for op in _SCHEMAS if not hasattr(torch.ops.sgl_kernel, op.__name__)]
    if missing and _library is None:
        _library = torch.library.Library(_NAMESPACE, "FRAGMENT")
    for op in missing:
        _library.define(op.__name__ + _SCHEMAS[op])
        _library.impl(op.__name__, op, "CompositeExplicitAutograd")
    return [op.__name__ for op in missing]

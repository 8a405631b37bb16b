"""Rows of a shared forward are those of the samples that run, whoever had their memory before."""

from types import SimpleNamespace

import torch

from sglang.multimodal_gen.configs.guidance_curves import COND_BRANCH
from sglang.multimodal_gen.runtime.guidance.rows.base import RowAdapter
from sglang.multimodal_gen.runtime.pipelines_core.stages.stepwise_denoising import (
    RowGroup,
    StepwiseDenoisingMixin,
)


class Rows(RowAdapter):
    dit_class = "any"


def sample(serial: int, value: float):
    kwargs = {"encoder_hidden_states": torch.full((1, 2, 3), value)}
    return SimpleNamespace(run=SimpleNamespace(serial=serial), kwargs_of=lambda branch: kwargs)


def test_a_sample_at_the_address_of_another_is_packed_anew():
    stage = StepwiseDenoisingMixin()
    stage.row_adapter = Rows(dit=None)
    one = sample(1, 1.0)
    stage._pack_groups([RowGroup(one, COND_BRANCH)])
    later = sample(2, 2.0)
    one.run, one.kwargs_of = later.run, later.kwargs_of  # the same id(), another sample
    packed = stage._pack_groups([RowGroup(one, COND_BRANCH)])
    assert packed.kwargs["encoder_hidden_states"].unique().item() == 2.0
    assert stage._pack_groups([RowGroup(one, COND_BRANCH)]) is packed

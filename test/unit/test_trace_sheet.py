"""A trace's bounds: which steps get pictures, how large the sheet is, how many traces stay."""

import os

import pytest
import torch

from sglang.multimodal_gen.runtime.guidance.inside import (
    MAX_PICTURED_STEPS,
    MAX_TRACES,
    _free_path,
    _keep_newest,
    pictured_steps,
)
from sglang.multimodal_gen.runtime.guidance.trace_sheet import TracedStep, draw_sheet


@pytest.mark.parametrize("num_steps", [1, 2, 7, 16, 17, 50, 1000])
def test_pictured_steps(num_steps):
    steps = pictured_steps(num_steps)
    assert len(steps) == min(num_steps, MAX_PICTURED_STEPS)
    assert {0, num_steps - 1} <= steps and max(steps) == num_steps - 1


def traced(error, size=(40, 30)):
    names = ("latents", "guided", "cond", "uncond") if error is not None else ("latents", "guided")
    random = torch.Generator().manual_seed(0)  # of many colours, one may be the red
    data = {"step": 3, "bucket": 1, "scale": 2.0, "shown_scale": error and -1.0, "error": error}
    return TracedStep(data, {name: torch.rand(3, *size, generator=random) for name in names})


def test_a_wrong_step_stands_in_red():
    red = (200, 30, 30)
    right, wrong = draw_sheet([traced(0.01)], "linear"), draw_sheet([traced(3.0)], "linear")
    assert red not in {color for _, color in right.getcolors(1 << 24)}
    assert red in {color for _, color in wrong.getcolors(1 << 24)}


def test_a_model_without_uncond_branch_has_a_sheet():
    sheet = draw_sheet([traced(None), traced(None)], [2.0, 1.0])
    assert sheet.width < 400


def test_requests_of_one_id_have_files_of_their_own(tmp_path):
    paths = []
    for request_id in ("one/id", "one/id", "one/id", None, None):
        paths.append(_free_path(tmp_path, request_id))
        paths[-1].write_text("x")
    assert [path.name for path in paths[:3]] == [
        *("guidance-one_id.png", "guidance-one_id-2.png", "guidance-one_id-3.png")
    ]
    assert len(set(paths)) == 5


def test_the_folder_keeps_the_newest(tmp_path):
    for i in range(MAX_TRACES + 3):
        for end in (".png", ".json"):
            path = tmp_path / f"guidance-{i}{end}"
            path.write_text("x")
            os.utime(path, (i, i))
    (tmp_path / "mine.png").write_text("x")
    _keep_newest(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left) == 2 * MAX_TRACES + 1 and "mine.png" in left
    assert "guidance-2.png" not in left and "guidance-3.json" in left

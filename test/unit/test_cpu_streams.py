"""Streams that do nothing, on a host without an accelerator."""

import subprocess
import sys

import pytest
import torch

from harness.processes import test_environment

COMPILE = """
import torch
from sglang.multimodal_gen.runtime.disaggregation.cpu_streams import use_cpu_streams

use_cpu_streams()
torch.get_device_module().Event().record(torch.get_device_module().current_stream())
print(torch.compile(torch.nn.Linear(4, 4), backend="eager")(torch.ones(1, 4)).shape)
"""


@pytest.mark.skipif(torch.accelerator.is_available(), reason="is for hosts with a CPU alone")
def test_torch_compile_works_beside_them():
    """In a process of its own: Dynamo looks at torch's functions once."""
    ran = subprocess.run(
        [sys.executable, "-c", COMPILE], env=test_environment(), capture_output=True, text=True
    )
    assert "torch.Size([1, 4])" in ran.stdout, ran.stderr

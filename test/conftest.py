"""Shared checkpoints, engines and servers. Each is started by the first test that asks for it."""

import os
from pathlib import Path

import pytest

from harness.engine import FP32, Engine
from harness.server import FP32_FLAGS, Server

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items):
    """GPU tests run only where there is a GPU."""
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


class Checkpoints:
    def __init__(self, root: Path):
        self._root = root

    def __getitem__(self, family: str) -> Path:
        """The tiny checkpoint of a family, built at its first use."""
        from sglang.multimodal_gen.tools.tiny_checkpoints import build_checkpoint

        path = self._root / f"tiny-{family}"
        if not path.exists():
            build_checkpoint(family, path)
        return path


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def glm(checkpoints) -> Path:
    return checkpoints["glm-image"]


def engine_fixture(family: str, **options):
    """A module-scoped engine fixture; see `harness.engine.Engine` for the options."""

    @pytest.fixture(scope="module")
    def engine(checkpoints):
        with Engine(checkpoints[family], **FP32, **options) as started:
            yield started

    return engine


# GLM-Image, fp32: upstream alone, and guidance buckets with rows split and packed; the first of
# these steps through the loop of continuous batching, the second through upstream's


@pytest.fixture(scope="session")
def glm_upstream(glm):
    with Engine(glm, upstream=True, **FP32) as engine:
        yield engine


@pytest.fixture(scope="session")
def glm_split(glm):
    with Engine(glm, guidance_buckets=8, guidance_rows="split", **FP32) as engine:
        yield engine


@pytest.fixture(scope="session")
def glm_packed(glm):
    with Engine(
        glm, guidance_buckets=8, guidance_rows="packed", max_running_samples=0, **FP32
    ) as engine:
        yield engine


@pytest.fixture(scope="session")
def server(glm):
    """A guidance server as the README starts it, with metrics."""
    with Server(glm, "--guidance-buckets", "8", "--enable-metrics", *FP32_FLAGS) as started:
        yield started

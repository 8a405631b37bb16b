"""The step loop has no device sync of its own."""

import pytest

from harness.engine import Engine
from harness.processes import probe_environment

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def engine(glm):
    with Engine(
        glm,
        env=probe_environment(PROBE_NO_SYNC="1"),
        guidance_buckets=8,
        attention_backend="torch_sdpa",
    ) as started:
        yield started


@pytest.mark.parametrize("text", ["", ' and a sign that says "open"'], ids=["plain", "quoted"])
@pytest.mark.parametrize("curve", ["constant:2", [2, 0, 1, 4, 0.5, 1], "front:3:1@0.5"], ids=str)
def test_no_sync(engine, curve, text):
    # the first forwards of a shape choose kernels by comparing their results, which syncs
    warm = engine.generate(prompt="warm up" + text, guidance_curve=curve)
    result = engine.generate(prompt="no sync" + text, guidance_curve=curve)
    assert result.guidance["forwards"] == warm.guidance["forwards"]


def test_the_probe_sees_a_sync(glm, tmp_path):
    """Post-processes that sync would be seen: a recorded prediction is copied to the host."""
    from harness.engine import Failed

    environment = probe_environment(PROBE_NO_SYNC="1", PROBE_RECORD=str(tmp_path))
    with Engine(
        glm, env=environment, guidance_buckets=8, attention_backend="torch_sdpa"
    ) as engine:
        with pytest.raises(Failed, match="synchroniz"):
            engine.generate(prompt="no sync", guidance_curve="constant:2")

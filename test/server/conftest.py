"""Comparisons and the recorded engine."""

import numpy as np
import pytest

from harness.engine import FP32, Engine
from harness.processes import probe_environment
from harness.recording import Recording
from harness.server import FP32_FLAGS, Server, ar_command


@pytest.fixture(scope="session")
def recording(tmp_path_factory):
    return Recording(tmp_path_factory.mktemp("recording"))


@pytest.fixture(scope="session")
def glm_recorded(glm, recording):
    """Guidance buckets with rows split; every branch's prediction is recorded."""
    environment = probe_environment(PROBE_RECORD=str(recording.directory))
    with Engine(
        glm,
        env=environment,
        guidance_buckets=8,
        guidance_rows="split",
        text_encoder_precisions=("fp32",),
        **FP32,
    ) as engine:
        yield engine


@pytest.fixture(scope="session")
def probed(glm, tmp_path_factory):
    """A server with a trace, and a probe that fails, slows or holds marked requests."""
    trace = tmp_path_factory.mktemp("trace") / "trace.json"
    let_go = trace.with_name("let go")
    flags = ("--guidance-buckets", "8", "--schedule-trace", str(trace), "--enable-metrics")
    environment = probe_environment(PROBE_SLOW="1", PROBE_FAIL="1", PROBE_HOLD=str(let_go))
    with Server(glm, *flags, *FP32_FLAGS, env=environment) as started:
        started.trace, started.let_go = trace, let_go
        yield started


@pytest.fixture(scope="session")
def relative_error():
    def error_of(got: np.ndarray, wanted: np.ndarray) -> float:
        """The largest ||got - wanted|| / ||wanted|| over the steps of [images, steps, ...]."""
        assert got.shape == wanted.shape
        got, wanted = (np.moveaxis(x, 1, 0).reshape(x.shape[1], -1) for x in (got, wanted))
        norms = np.linalg.norm(wanted, axis=1)
        return float((np.linalg.norm(got - wanted, axis=1) / norms).max())

    return error_of


@pytest.fixture(scope="session")
def ar_server(glm):
    """A real AR server of SRT, which honours seeds."""
    with Server(glm, command=ar_command(glm)) as started:
        yield started

"""Steps that samples share: whose rows are in a forward, and the loop around a real worker."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from prometheus_client import CollectorRegistry

from harness.engine import FP32
from harness.worker import Worker
from sglang.multimodal_gen.configs.guidance_curves import COND_BRANCH
from sglang.multimodal_gen.runtime.guidance.abort import AbortReq
from sglang.multimodal_gen.runtime.guidance.rows.base import RowAdapter
from sglang.multimodal_gen.runtime.managers import sample_runner
from sglang.multimodal_gen.runtime.observability.metrics import DiffusionMetrics
from sglang.multimodal_gen.runtime.pipelines_core.stages.stepwise_denoising import (
    RowGroup,
    StepwiseDenoisingMixin,
)

REQUEST = dict(num_inference_steps=4, guidance_curve="constant:2", save_output=False)


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


@pytest.fixture(scope="module")
def worker(glm):
    started = Worker(glm, guidance_buckets=8, text_encoder_precisions=("fp32",), **FP32)
    yield started
    started.close()


def turns(loop) -> None:
    """Until every request has its answer."""
    while loop.waiting or loop.running:
        loop._act(loop._decide())
    loop.runner.drain()


def run(loop, requests) -> list:
    """Answers of requests that none fails."""
    loop.answers.clear()
    for number, request in enumerate(requests):
        loop._enqueue(number, request)
    turns(loop)
    assert not any(output.error for output in loop.answers.values())
    return [loop.answers[number] for number in range(len(requests))]


def test_what_cannot_share_does_not_try_at_every_step(worker, monkeypatch):
    tried: list[int] = []
    predict = worker.stage._predict_shared

    def predict_in_small_memory(samples, *args):
        tried.append(len(samples))
        if len(samples) > 2:
            raise torch.OutOfMemoryError("not enough for three")
        return predict(samples, *args)

    monkeypatch.setattr(worker.stage, "_predict_shared", predict_in_small_memory)
    loop = worker.loop()
    run(loop, [worker.request(**REQUEST) for _ in range(4)])
    assert sum(count > 2 for count in tried) == 1 and tried.count(2) > 1
    tried.clear()
    run(loop, [worker.request(**REQUEST) for _ in range(4)])
    assert max(tried) > 2  # others may fit where these did not


class Spans:
    """A request's trace context that keeps what begins and ends."""

    tracing_enable = True

    def __init__(self):
        self.seen = []

    def rebuild_thread_context(self):
        self.seen.append("thread")

    def trace_slice_start(self, name, level):
        self.seen.append(f"{name} begins")

    def trace_slice_end(self, name, level, **kwargs):
        self.seen.append(f"{name} ends")


SPANS = [
    *("thread", "scheduler_dispatch begins", "gpu_forward begins"),
    *("gpu_forward ends", "scheduler_dispatch ends"),
]


@pytest.mark.parametrize("fails", [False, True])
def test_spans_of_requests_side_by_side(worker, monkeypatch, fails):
    requests = [worker.request(**REQUEST) for _ in range(2)]
    for request in requests:
        request.trace_ctx = Spans()
    if fails:
        monkeypatch.setattr(worker.stage, "step_samples", None)
    loop = worker.loop()
    for number, request in enumerate(requests):
        loop._enqueue(number, request)
    loop._act(loop._decide())
    assert requests[0].trace_ctx.seen == SPANS[:3]
    turns(loop)
    assert [request.trace_ctx.seen for request in requests] == [SPANS] * 2


def test_upstreams_metrics(worker):
    registry = CollectorRegistry()
    loop = worker.loop(DiffusionMetrics(role="r", replica="0", registry=registry))

    def value(name: str, **labels) -> float:
        labels = {"role": "r", "replica": "0", **labels}
        return registry.get_sample_value(f"sglang:diffusion_{name}", labels) or 0.0

    loop.metrics = None  # its own metrics have a registry of the process
    requests = [worker.request(**REQUEST) for _ in range(2)]
    for number, request in enumerate(requests):
        request.request_id = f"request {number}"
    run(loop, requests)
    steps, requests_stepped = (
        value(f"generation_batch_size_{part}", stop_reason="shared_step")
        for part in ("count", "sum")
    )
    assert requests_stepped == 2 * REQUEST["num_inference_steps"] > steps
    gone = worker.request(**REQUEST)
    gone.request_id = "gone"
    loop._enqueue(2, gone)
    loop._act(loop._decide())
    loop._abort(3, AbortReq("gone"))
    assert loop.answers[2].error and not loop.running
    counted = {
        status: value("requests_total", status=status, is_warmup="false")
        for status in ("success", "error", "aborted")
    }
    assert counted == {"success": 2, "error": 0, "aborted": 1}
    assert value("num_running_reqs") == value("num_queue_reqs") == 0


@pytest.mark.parametrize("beside", [True, False])
def test_memory_is_measured_as_upstream_does(worker, monkeypatch, beside):
    """But for the peak of requests side by side, which is one."""
    done, loop = [], worker.loop()
    loop.runner._decodes_beside = beside
    device, platform = torch.get_device_module(), sample_runner.current_platform
    with_device = Mock(wraps=platform, **{"is_cpu.return_value": False})
    monkeypatch.setattr(sample_runner, "current_platform", with_device)
    monkeypatch.setattr(device, "reset_peak_memory_stats", lambda: done.append("reset"))

    def prepare(*args, prepare=loop.runner.prepare, **kwargs):
        done.append("prepare")
        return prepare(*args, **kwargs)

    monkeypatch.setattr(loop.runner, "prepare", prepare)
    for output in run(loop, [worker.request(**REQUEST) for _ in range(2)]):
        assert set(output.metrics.memory_snapshots) >= {"before_forward", "after_forward"}
    assert done == ["reset", "prepare", "prepare"]

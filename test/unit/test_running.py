"""What the loop keeps of a request."""

from types import SimpleNamespace

import pytest

from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
from sglang.multimodal_gen.runtime.guidance.running import Admitted, Running
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req


class Spans:
    """A trace context of ``--enable-trace``, without OpenTelemetry's SDK."""

    def __init__(self):
        self.open, self.closed, self.finished = [], [], False

    def rebuild_thread_context(self):
        assert not self.open

    def trace_slice_start(self, name, level):
        self.open.append((name, level))

    def trace_slice_end(self, name, level, thread_finish_flag):
        assert self.open.pop() == (name, level)
        self.closed.append(name)
        assert not self.finished
        self.finished = thread_finish_flag


def test_a_requests_spans_last_from_its_admission_to_its_answer():
    """Also those of a group, whose requests may share one context."""
    contexts = Spans(), Spans()
    requests = []
    for context in (*contexts, contexts[0]):
        requests.append(Req(sampling_params=SamplingParams(prompt="a")))
        requests[-1].trace_ctx = context
    admitted = Admitted(b"", requests, 0.0)
    for context in contexts:
        assert context.open == [("scheduler_dispatch", 1), ("gpu_forward", 2)]
    assert [admitted.claim_answer() for _ in range(2)] == [True, False]
    for context in contexts:
        assert context.closed == ["gpu_forward", "scheduler_dispatch"] and context.finished


@pytest.mark.parametrize(
    ("of_sample", "after_a_failure", "wanted"),
    [(None, None, None), (4, None, 4), (None, 2, 2), (4, 2, 2), (4, 8, 4), (4, 0, 0)],
)
def test_rows_of_a_shared_step(of_sample, after_a_failure, wanted):
    sample = SimpleNamespace(most_rows=of_sample)
    running = Running(1, None, 0, sample, row_limit=after_a_failure)
    assert running.most_rows == wanted

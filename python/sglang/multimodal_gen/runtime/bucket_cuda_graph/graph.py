# SPDX-License-Identifier: Apache-2.0
"""One bucket graph: captured, checked against eager, timed, replayed."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from sglang.multimodal_gen.runtime.bucket_cuda_graph.buckets import Cost, GraphBucket
from sglang.multimodal_gen.runtime.bucket_cuda_graph.inputs import StaticInputs
from sglang.multimodal_gen.runtime.bucket_cuda_graph.recorder import Recorder, Recording

# A replay runs the kernels that eager runs, on the same shapes: mostly it is bit-equal. Where a
# kernel sums in another order from call to call, this share of the largest value is allowed.
TOLERANCE = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 1e-5}

_TIMED_RUNS = 3  # back to back, as steps are
_LONG_S = 0.1  # one run as long as this is timed well enough: a request may be on its way


class GraphDiffers(RuntimeError):
    """A replay is not what eager computes from the same inputs."""


# rows -> the DiT's prediction of each row, and the combine of each image
Forward = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


@dataclass(eq=False)
class BucketGraph:
    """A recording with its outputs; made by `capture`.

    Attributes:
        error: largest difference to eager, as a share of the largest value; 0 is bit-equal.
        capture_s: seconds that capturing took, of which `forwards_s` in eager and replayed
            forwards.
        own_bytes: device memory that comes back with the graph; `pool_bytes`: that the shared pool
            grew by.
        rows_out: the DiT's prediction ``[rows, ...]``; combined: ``[rows, ...]`` in fp32, one entry
            an image. Both are overwritten by the next replay.
    """

    bucket: GraphBucket
    recording: Recording = field(repr=False)
    rows_out: torch.Tensor = field(repr=False)
    combined: torch.Tensor = field(repr=False)
    context: Callable[[], AbstractContextManager] = field(repr=False)
    cost: Cost = field(init=False)
    error: float = field(init=False)
    capture_s: float = field(init=False)
    forwards_s: float = field(init=False)
    own_bytes: int = field(default=0)
    pool_bytes: int = field(default=0)

    def replay(self) -> None:
        with self.context():  # what a breakable graph runs eagerly asks for it
            self.recording.replay()


class MemoryMeter:
    """Bytes in use on the device: what the allocator holds, and all of it."""

    def __init__(self, device: torch.device):
        self.device = device

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0

    def outside(self) -> int:
        """Beside the allocator: graphs themselves, libraries, other processes."""
        if self.device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - self.reserved()

    def activations(self, run: Callable[[], object]) -> int:
        """What `run` allocates at most beyond what is allocated already."""
        if self.device.type != "cuda":
            run()
            return 0
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        return torch.cuda.max_memory_allocated(self.device) - before


def capture(
    bucket: GraphBucket,
    inputs: StaticInputs,
    forward: Forward,
    recorder: Recorder,
    context: Callable[[], AbstractContextManager],
    randomize: Callable[[int], None],
    meter: MemoryMeter,
    may_record: Callable[[int], None],
) -> BucketGraph:
    """Record `forward` for a bucket and check a replay against eager on other random inputs.

    Args:
        context: entered around each replay.
        randomize: fills the static inputs at random, from a seed.
        may_record: given the bytes of the activations; raises where they do not fit the budget.

    Raises:
        GraphDiffers: where a replay is not what eager computes.
        Exception: whatever the forward or the capture raised; nothing is left behind.
    """
    start = time.perf_counter()
    forwards_s = 0.0

    def seconds(run: Callable[[], object], runs: int = 1) -> float:
        nonlocal forwards_s
        _synchronize(meter.device)
        begin = time.perf_counter()
        for _ in range(runs):
            run()
        _synchronize(meter.device)
        passed = time.perf_counter() - begin
        forwards_s += passed
        return passed / runs

    def milliseconds(run: Callable[[], object]) -> float:
        once = seconds(run)
        return 1000 * (once if once > _LONG_S else seconds(run, _TIMED_RUNS))

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return forward(bucket.rows)

    randomize(0)
    with recorder.stream():
        seconds(run)  # chooses kernels, which synchronizes
        may_record(meter.activations(lambda: seconds(run)))
        eager_ms = milliseconds(run)
    reserved, outside = meter.reserved(), meter.outside()
    recording, (rows_out, combined) = recorder.record(run)
    graph = BucketGraph(bucket, recording, rows_out, combined, context)
    graph.pool_bytes = meter.reserved() - reserved
    try:
        randomize(1)
        seconds(graph.replay)  # uploads the graph, too
        graph.own_bytes = max(0, meter.outside() - outside)
        replayed = (rows_out.clone(), combined.clone())
        eager: list[torch.Tensor] = []
        with recorder.stream():
            seconds(lambda: eager.extend(run()))
        graph.error = max(map(_difference, replayed, eager))
        tolerance = TOLERANCE[getattr(torch, bucket.shape.dtype)]
        if not graph.error <= tolerance:
            raise GraphDiffers(f"it differs from eager by {graph.error:.1e}, over {tolerance:.1e}")
        graph.cost = Cost(replay_ms=milliseconds(graph.replay), eager_ms=eager_ms)
    except BaseException:
        recorder.reset(recording)
        raise
    graph.forwards_s = forwards_s
    graph.capture_s = time.perf_counter() - start
    return graph


def _difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference as a share of the largest value; NaN where either has one."""
    got, wanted = got.float(), wanted.float()
    return float((got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

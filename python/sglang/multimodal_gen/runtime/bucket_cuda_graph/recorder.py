# SPDX-License-Identifier: Apache-2.0
"""How one forward becomes a graph, and how a recording that failed is undone."""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch


class Recording(Protocol):
    def replay(self) -> None: ...


class Recorder(Protocol):
    """Records calls; what they allocate comes from one pool that all recordings share."""

    def stream(self) -> AbstractContextManager:
        """Entered around warm-up forwards: what they allocate belongs to the recording's stream."""

    def record(self, function: Callable[[], Any]) -> tuple[Recording, Any]:
        """A recording of `function` and what it returned: static tensors."""

    def reset(self, recording: Recording) -> None:
        """Give back what the recording holds beside the pool."""

    def release_pool(self) -> None:
        """Called with no recording left: the next one begins another pool."""


class FullGraphRecorder:
    """One CUDA graph for the whole forward."""

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def stream(self) -> AbstractContextManager:
        return _side_stream(self._stream)

    def record(self, function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph = torch.cuda.CUDAGraph()
        with self.stream(), _generator_set_aside(self.device), _no_garbage_collection():
            # other threads use the device meanwhile: their calls must not end this capture
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output = function()
            except BaseException:
                self._end_failed(graph)
                raise
            try:
                graph.capture_end()
            except BaseException:
                _abandon_capture(self.device, self._pool)
                raise
        return graph, output

    def _end_failed(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except Exception:  # the capture was invalid already
            _abandon_capture(self.device, self._pool)
        else:
            graph.reset()

    def reset(self, recording: torch.cuda.CUDAGraph) -> None:
        recording.reset()

    def release_pool(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()


class BreakableRecorder(FullGraphRecorder):
    """Upstream's breakable graphs: attention runs eagerly between the segments."""

    def record(self, function: Callable[[], Any]) -> tuple[Recording, Any]:
        from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph import (  # noqa: E501
            BreakableCUDAGraph,
            BreakableCUDAGraphCapture,
        )
        from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import (
            enable_breakable_cuda_graph,
        )

        graph = BreakableCUDAGraph()
        capture = BreakableCUDAGraphCapture(
            cuda_graph=graph,
            pool=self._pool,
            stream=self._stream,
            capture_error_mode="thread_local",
        )
        with self.stream(), _generator_set_aside(self.device), _no_garbage_collection():
            try:
                with enable_breakable_cuda_graph(), capture:
                    output = function()
            except BaseException:
                if capture._current_graph is not None:  # this segment could not be ended
                    _abandon_capture(self.device, self._pool)
                self.reset(graph)
                raise
        return graph, output

    def reset(self, recording: Recording) -> None:
        for segment in recording._segments:
            segment.reset()
        recording._segments.clear()
        recording._break_fns.clear()


class EagerRecorder:
    """Runs the function at every replay: the same inputs and outputs on a host without a GPU."""

    def stream(self) -> AbstractContextManager:
        return nullcontext()

    def record(self, function: Callable[[], Any]) -> tuple[Recording, Any]:
        output = tuple(tensor.clone() for tensor in function())
        return _EagerRecording(function, output), output

    def reset(self, recording: Recording) -> None:
        pass

    def release_pool(self) -> None:
        pass


class _EagerRecording:
    def __init__(self, function: Callable[[], Any], output: tuple[torch.Tensor, ...]):
        self._function, self._output = function, output

    def replay(self) -> None:
        for tensor, new in zip(self._output, self._function()):
            tensor.copy_(new)


@contextmanager
def _side_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


@contextmanager
def _generator_set_aside(device: torch.device) -> Iterator[None]:
    """Let the capture register a copy of the default generator's state.

    A capture marks the state that it registers, and one that fails leaves the mark: every later
    draw from it would raise. The copy takes the mark with it.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    own = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(own)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection could free other graphs in the middle of a capture, which ends it."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _abandon_capture(device: torch.device, pool: tuple[int, int]) -> None:
    """After a capture that could not be ended: the allocator must leave its pool."""
    index = torch.cuda.current_device() if device.index is None else device.index
    torch._C._cuda_endAllocateToPool(index, pool)
    torch._C._cuda_releasePool(index, pool)

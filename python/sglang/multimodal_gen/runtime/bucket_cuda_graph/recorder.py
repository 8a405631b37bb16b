# SPDX-License-Identifier: Apache-2.0
"""How one forward becomes a graph, and how a recording that failed is undone."""

import ctypes
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
        """Give back what the recording holds; with the last one goes the pool."""


class FullGraphRecorder:
    """One CUDA graph for the whole forward."""

    def __init__(self, device: torch.device):
        self.device = torch.device(device.type, device.index or 0)
        self._stream = torch.cuda.Stream(self.device)
        self._pool: tuple[int, int] | None = None  # of the next recording
        self._pools: dict[int, tuple[int, int]] = {}  # of each recording, by its id

    def stream(self) -> AbstractContextManager:
        return _side_stream(self._stream)

    def record(self, function: Callable[[], Any]) -> tuple[Recording, Any]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with self.stream(), _generator_set_aside(self.device), _no_garbage_collection():
            try:
                recording, output = self._capture(function)
                self._pools[id(recording)] = self._pool
            finally:
                self._leave_empty_pool()
        return recording, output

    def _capture(self, function: Callable[[], Any]) -> tuple[Recording, Any]:
        graph = torch.cuda.CUDAGraph()
        # other threads use the device meanwhile: their calls must not end this capture
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            output = function()
        except BaseException:
            try:
                graph.capture_end()
            except Exception:  # what failed has made the capture invalid
                self._abandon(graph)
            else:
                graph.reset()
            raise
        try:
            graph.capture_end()
        except BaseException:
            self._abandon(graph)
            raise
        return graph, output

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """After a capture that could not be ended.

        The device's allocator is told to leave the pool and to count one graph less. The pinned
        memory's allocator cannot be told: for good, it takes the pool for one that records, and
        asks this graph whether a stream is its own. So the pool takes no more graphs, and the
        graph is never destroyed.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))
        torch._C._cuda_endAllocateToPool(self.device.index, self._pool)
        torch._C._cuda_releasePool(self.device.index, self._pool)
        self._pool = None

    def reset(self, recording: Recording) -> None:
        self._reset(recording)
        del self._pools[id(recording)]
        self._leave_empty_pool()

    def _leave_empty_pool(self) -> None:
        # torch gives a pool back with its last graph; it cannot be taken again
        if self._pool not in self._pools.values():
            self._pool = None

    def _reset(self, recording: torch.cuda.CUDAGraph) -> None:
        recording.reset()


class BreakableRecorder(FullGraphRecorder):
    """Upstream's breakable graphs: attention runs eagerly between the segments."""

    def _capture(self, function: Callable[[], Any]) -> tuple[Recording, Any]:
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
        failure = None

        def attempt() -> Any:
            nonlocal failure
            try:
                return function()
            except BaseException as error:
                failure = error  # leaving the capture raises another, about the segment
                raise

        try:
            with enable_breakable_cuda_graph(), capture:
                output = attempt()
        except BaseException:
            unended = capture._current_graph
            self._reset(graph)
            if unended is not None:
                self._abandon(unended)
            if failure is not None:
                raise failure from None
            raise
        return graph, output

    def _reset(self, recording: Recording) -> None:
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
    generator = torch.cuda.default_generators[device.index]
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

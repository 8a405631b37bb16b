# SPDX-License-Identifier: Apache-2.0
"""Streams and events that do nothing, for disaggregated roles on hosts with a CPU alone.

`torch.get_device_module()` names the accelerator that torch was built for, there or not. On a CPU
everything that upstream orders with streams has happened already.
"""

import functools
from contextlib import nullcontext
from typing import Any

import torch


class _Nothing:
    """A stream or an event: takes any argument, has always happened."""

    def __init__(self, *_args: Any, **_kwargs: Any):
        pass

    def _nothing(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    record = wait_event = wait_stream = synchronize = _nothing


class _CpuStreams:
    """The accelerator's module with its streams and events taken out."""

    Stream = Event = _Nothing

    def __init__(self, module: Any):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def current_stream(self) -> _Nothing:
        return _Nothing()

    def stream(self, _stream: _Nothing):
        return nullcontext()


def use_cpu_streams() -> None:
    """From here on, in this process; does nothing where there is an accelerator."""
    if torch.accelerator.is_available():
        return
    get_device_module = torch.get_device_module
    streams = _CpuStreams(get_device_module())

    @functools.wraps(get_device_module)  # torch.compile looks for what this cached function wraps
    def module_or_streams(device: Any = None) -> Any:
        return streams if device is None else get_device_module(device)

    torch.get_device_module = module_or_streams

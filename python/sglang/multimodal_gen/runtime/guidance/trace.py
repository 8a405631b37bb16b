# SPDX-License-Identifier: Apache-2.0
"""What the step loop did when, in the Chrome trace format (chrome://tracing, ui.perfetto.dev)."""

import json
import time
from typing import Any, TextIO

from sglang.multimodal_gen.runtime.utils.logging_utils import init_logger

logger = init_logger(__name__)


class ScheduleTrace:
    """Writes one event a line; the file is valid for a viewer at any time.

    One lane a sample: its preparation, each step with bucket, scale and rows, and its decoding;
    lane 0 has the shared steps.
    """

    def __init__(self, path: str):
        self._file: TextIO = open(path, "w", buffering=1)
        self._start = time.monotonic()
        self._file.write("[\n")

    def span(self, name: str, lane: int, start: float, end: float, **args: Any) -> None:
        """An event from `start` to `end`, both of ``time.monotonic()``."""
        event = {
            "name": name,
            "ph": "X",
            "pid": 0,
            "tid": lane,
            "ts": round((start - self._start) * 1e6),
            "dur": round((end - start) * 1e6),
            "args": args,
        }
        try:
            self._file.write(json.dumps(event) + ",\n")
        except OSError as error:  # a full disk stops the trace, not the server
            logger.error("The trace has a gap: %s", error)

    def close(self) -> None:
        self._file.close()

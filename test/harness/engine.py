"""`Engine`: SGLang's own DiffGenerator, with its real scheduler process (or ranks)."""

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.processes import UPSTREAM_ONLY, free_ports, stop, tail, test_environment

FP32 = {"dit_precision": "fp32", "vae_precision": "fp32"}
COMPILED = {"enable_torch_compile": True, "regional_compile": True}
QUICK_COMPILE = {"SGLANG_TORCH_COMPILE_MODE": "default"}  # tries no variants of kernels
START_SECONDS = 480
REQUEST_SECONDS = 300


@dataclass
class Result:
    """images: uint8 [images, H, W, 3]; latents: after each step, [images, steps, ...]."""

    images: np.ndarray
    latents: np.ndarray
    metrics: dict[str, Any]
    peak_memory_mb: float = 0.0

    @property
    def guidance(self) -> dict[str, Any]:
        return self.metrics["guidance"]


class Refused(Exception):
    """The engine refused the request before it ran."""


class Failed(Exception):
    """The engine took the request and answered it with an error."""


class Engine:
    """Starts at once; usable as a context manager."""

    def __init__(
        self,
        model: Path,
        *,
        upstream: bool = False,
        env: Mapping[str, str] | None = None,
        **server_kwargs: Any,
    ):
        """
        Args:
            upstream: with the plugin off (a CPU host keeps the two missing ops).
            server_kwargs: for `DiffGenerator.from_pretrained`.
        """
        self._dir = tempfile.TemporaryDirectory(prefix="engine-")
        self.log = Path(self._dir.name) / "log"
        scheduler_port, master_port = free_ports(2)
        kwargs = {
            "model_path": str(model),
            "scheduler_port": scheduler_port,
            "master_port": master_port,
            "sleep_on_idle": True,  # or each idle engine spins a core
            **server_kwargs,
        }
        self._log_file = self.log.open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "harness.engine_main", json.dumps(kwargs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log_file,
            text=True,
            cwd=Path(__file__).parent.parent,
            env=test_environment(UPSTREAM_ONLY if upstream else {}, env or {}),
            start_new_session=True,
        )
        self._answer(START_SECONDS)

    def generate(self, **request: Any) -> Result:
        """One request. Raises `Refused` or `Failed`."""
        path = Path(self._dir.name) / "result.npz"
        request = {
            "prompt": "a cat",
            "width": 64,
            "height": 64,
            "num_inference_steps": 6,
            "seed": 7,
            "return_trajectory_latents": True,
            "output_path": self._dir.name,
            "output_file_name": None,
            **request,
            "result_path": str(path),
        }
        request = {name: value for name, value in request.items() if value is not None}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self._answer(REQUEST_SECONDS)
        with np.load(path) as arrays:
            return Result(arrays["images"], arrays["latents"], **answer)

    def _answer(self, seconds: float) -> Any:
        # a hung rank prints nothing: the watchdog ends the engine, and with it the reading
        watchdog = threading.Timer(seconds, self.process.kill)
        watchdog.start()
        try:
            return self._read_answer()
        finally:
            watchdog.cancel()

    def _read_answer(self) -> Any:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"no answer from the engine:\n{tail(self.log)}")
        kind, payload = json.loads(line)
        if kind == "refused":
            raise Refused(payload)
        if kind == "failed":
            raise Failed(tail(self.log))
        return payload

    def close(self) -> None:
        stop(self.process)
        self._log_file.close()
        self._dir.cleanup()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_exc) -> None:
        self.close()



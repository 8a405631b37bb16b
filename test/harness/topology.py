"""Head and denoisers of GLM-Image, each a process as a user starts it; and sglang-router."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness.processes import free_ports, stop, tail, test_environment
from harness.server import FP32_FLAGS, START_SECONDS, Server

_BIN = Path(sys.executable).parent


class Worker:
    """A process without HTTP; usable as a context manager."""

    def __init__(self, command: list[str], ready: str):
        """
        Args:
            ready: what its log says when it can be used.
        """
        self._dir = tempfile.TemporaryDirectory(prefix="worker-")
        self.log = Path(self._dir.name) / "log"
        self._log_file = self.log.open("w")
        self._ready = ready
        self.process = subprocess.Popen(
            command,
            stdout=self._log_file,
            stderr=subprocess.STDOUT,
            env=test_environment(),
            start_new_session=True,
        )

    def wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while self._ready not in self.log.read_text(errors="replace"):
            if time.monotonic() > deadline or self.process.poll() is not None:
                log = tail(self.log)
                self.close()
                raise RuntimeError(f"the worker did not start:\n{log}")
            time.sleep(0.3)

    def pause(self) -> None:
        """Nothing in it runs on; it can still be killed."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """SIGKILL, to it and to all that it started."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        stop(self.process)
        self._log_file.close()
        self._dir.cleanup()


class Topology:
    """A head with denoisers, `ar_url` beside them. They start at once; usable as a context manager.

    Attributes:
        head: takes requests.
        traces: what each denoiser's loop does when.
    """

    def __init__(self, model: Path, ar_url: str, denoisers: int, *flags: str):
        # a head also takes the five ports above its own
        head_port, _, _, *work_ports = free_ports(3 + denoisers)
        flags = ("--srt-encoder-url", ar_url, *flags)
        self._dir = tempfile.TemporaryDirectory(prefix="topology-")
        self.traces = [Path(self._dir.name) / f"trace.{port}" for port in work_ports]
        self.denoisers = [
            Worker(
                [
                    *(str(_BIN / "sglang"), "serve", "--model-path", str(model)),
                    *("--disagg-role", "denoiser", "--num-gpus", "1", "--batching-max-size", "1"),
                    *("--disagg-server-addr", f"tcp://127.0.0.1:{head_port}"),
                    *("--scheduler-port", str(port), "--master-port", str(free_ports(1)[0])),
                    *("--schedule-trace", str(trace), *FP32_FLAGS, *flags),
                ],
                ready="GLM distributed denoiser registered",
            )
            for port, trace in zip(work_ports, self.traces)
        ]
        urls = ";".join(f"tcp://127.0.0.1:{port}" for port in work_ports)
        self.head = Server(
            model,
            command=[
                *(str(_BIN / "sglang"), "serve", "--model-path", str(model)),
                *("--disagg-role", "server", "--denoiser-urls", urls),
                *("--port", str(free_ports(1)[0]), "--scheduler-port", str(head_port), *flags),
            ],
            waits=False,
        )
        try:
            self.head.wait()
            for denoiser in self.denoisers:
                denoiser.wait()
        except RuntimeError:
            self.close()
            raise

    def close(self) -> None:
        for process in (self.head, *self.denoisers):
            process.close()
        self._dir.cleanup()

    def __enter__(self) -> "Topology":
        return self

    def __exit__(self, *_exc) -> None:
        self.close()


def router_command(urls: list[str]) -> list[str]:
    """sglang-router in front of AR servers."""
    (port,) = free_ports(1)
    return [
        *(sys.executable, "-m", "sglang_router.launch_router", "--worker-urls", *urls),
        *("--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"),
    ]

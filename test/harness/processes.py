"""Ports, environment and the end of the processes that tests start."""

import itertools
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HARNESS = Path(__file__).parent
PROBE = HARNESS / "probe"

# no plugin but the missing CPU ops (and a test's probe): upstream as it is
UPSTREAM_ONLY = {"SGLANG_PLUGINS": "cpu_norm_ops,guidance_probe"}


def test_environment(*extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of an engine or a server: one thread, no perf logs, and `extra`."""
    environment = dict(os.environ)
    environment.update(
        {
            "OMP_NUM_THREADS": "1",
            "SGLANG_PERF_LOG_DIR": "",
            "HF_HUB_OFFLINE": "1",
            "PYTHONWARNINGS": "ignore",
        }
    )
    for mapping in extra:
        environment.update(mapping)
    return environment


test_environment.__test__ = False  # not a test, whatever pytest thinks of the name


def probe_environment(**settings: str) -> dict[str, str]:
    """Adds the probe plugin (harness/probe) and its settings."""
    path = os.pathsep.join(filter(None, [str(PROBE), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": path, **settings}


# Below the range that the system hands out by itself: a port stays free until its owner, still
# importing, binds it. Runs side by side begin at different places.
_ports = itertools.cycle(range(20_000 + os.getpid() * 38 % 9_000, 32_000, 2))


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, each with the next one: SGLang also opens HTTP port + 1."""
    found = []
    while len(found) < count:
        port = next(_ports)
        if _is_free(port) and _is_free(port + 1):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def wait_until(condition: Callable[[], Any], seconds: float = 60) -> Any:
    """What `condition` gives as soon as that is true; the time is for machines that are busy."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.02)
    return value


def stop(process: subprocess.Popen, seconds: float = 15) -> None:
    """End a process that leads its own session, with all that it started."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def tail(path: Path, lines: int = 60) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])

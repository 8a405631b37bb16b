"""Ports, environment and the end of the processes that tests start."""

import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

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


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; SGLang also opens the HTTP port + 1."""
    sockets = []
    try:
        while len(sockets) < count:
            sock = socket.socket()
            sock.bind(("127.0.0.1", 0))
            sockets.append(sock)
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


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

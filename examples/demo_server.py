# SPDX-License-Identifier: Apache-2.0
"""Starts `sglang serve`, waits until it is ready, and stops it with its workers."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CLEAR_LINE = "\033[K" if sys.stdout.isatty() else ""


def say(text: str) -> None:
    print(f"== {text}", flush=True)


class ServerFailed(RuntimeError):
    """The server did not come up."""


@contextmanager
def serve(
    command: list[str], environment: dict[str, str], *, log: Path, folder: Path, wait: int
) -> Iterator[str]:
    """Run `command`, a `sglang serve` without a port, until the caller is done; yields its URL."""
    port = free_port()
    command = [*command, "--port", str(port)]
    say("Starting the server")
    print(f"  {' '.join(command)}\n  its log: {log}")
    with log.open("w") as log_file:
        process = subprocess.Popen(
            command,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            env={**os.environ, **environment},
            start_new_session=True,  # Ctrl-C is ours to handle
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(process, url, log, wait)
        yield url
    finally:
        stop(process)


def free_port() -> int:
    """A free port whose successor is free too: SGLang opens both."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def wait_until_healthy(process: subprocess.Popen, url: str, log: Path, wait: int) -> None:
    start, shown = time.monotonic(), 0.0
    while (waited := time.monotonic() - start) < wait:
        if process.poll() is not None:
            raise ServerFailed(f"the server ended with code {process.returncode}\n{tail(log)}")
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
        except OSError:  # not up yet, or it says that it is not ready
            if waited - shown >= (1 if sys.stdout.isatty() else 10):
                shown = waited
                print(
                    f"  waiting for it to be ready: {waited:.0f} of at most {wait} s",
                    end="\r" if sys.stdout.isatty() else "\n",
                    flush=True,
                )
            time.sleep(0.5)
        else:
            print(f"{CLEAR_LINE}  ready after {waited:.0f} s")
            return
    raise ServerFailed(f"the server was not ready after {wait} s\n{tail(log)}")


def stop(process: subprocess.Popen) -> None:
    """Stop the server and its workers, which share its process group."""
    say("Stopping the server")
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            continue
    print(f"  stopped (process {process.pid})")


def tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])

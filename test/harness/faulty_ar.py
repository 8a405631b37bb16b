"""`FaultyAR`: a small HTTP server that answers like GLM-Image's AR server, or wrongly on purpose.

For faults alone; what an AR server really writes is tested with SGLang's own.
"""

import contextlib
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CODEBOOK = 128  # of the tiny checkpoint
PROBE_TOKENS = 16
GLM_IMAGE = "GlmImageForConditionalGeneration"


class FaultyAR:
    """Usable as a context manager. `faults` are taken one a request, then it answers well.

    Attributes:
        always: a fault of every request, when `faults` are used up.
        failing_looks: how many questions for its model it answers with 500.
        silent_looks: whether it never answers them.
        probe_fault: a fault of the short requests that try it out, which count nowhere else.
        requests: bodies of the requests to /generate, in order.
        may_answer: cleared, each request waits for it.
        gone: how many clients went away before their answer.
        architecture, model_path, weight_version: what it tells of its model.
        told: what it tells besides, or in place of that.
    """

    def __init__(
        self, port: int = 0, *, architecture: str = GLM_IMAGE, honours_seeds: bool = True
    ):
        self.architecture = architecture
        self.model_path = "/nowhere/ar"
        self.weight_version = "default"
        self.faults: list[str] = []
        self.always: str | None = None
        self.probe_fault: str | None = None
        self.failing_looks = 0
        self.silent_looks = False
        self.told: dict[str, Any] = {}
        self.honours_seeds = honours_seeds
        self.healthy = True
        self.requests: list[dict[str, Any]] = []
        self.sizes: list[int] = []
        self.waiting = self.most_waiting = self.gone = 0
        self.seconds = 0.0
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.lock = threading.Lock()
        self.connections: set[socket.socket] = set()
        handler = type("Handler", (_Handler,), {"ar": self})
        ThreadingHTTPServer.request_queue_size = 128
        self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def reset(self) -> None:
        """Forget what was asked and how to fail."""
        self.faults, self.always, self.requests, self.sizes = [], None, [], []
        self.most_waiting = self.gone = 0
        self.may_answer.set()
        self.seconds, self.healthy, self.probe_fault = 0.0, True, None
        self.honours_seeds, self.failing_looks = True, 0
        self.silent_looks, self.told = False, {}
        self.replace()

    def replace(self, architecture: str = GLM_IMAGE, model_path: str = "/nowhere/ar") -> None:
        """As if another process took its place, with another model where one is named."""
        same = self.model == (model_path, "default") and self.architecture == architecture
        self.architecture, self.model_path = architecture, model_path
        self.weight_version = "default"
        if not same:
            self.hang_up()

    def hang_up(self) -> None:
        """Close every connection, as the end of a process does."""
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @property
    def model(self) -> tuple[str, str]:
        return self.model_path, self.weight_version

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> "FaultyAR":
        return self

    def __exit__(self, *_exc) -> None:
        self.close()

    def ids(self, body: dict[str, Any]) -> list[int]:
        """The right ids for a request: by model and seed, or by chance where seeds are ignored."""
        seed = body["sampling_params"].get("sampling_seed")
        draw = random.Random(f"{self.model} {seed}" if self.honours_seeds else None)
        return [draw.randrange(CODEBOOK) for _ in range(body["sampling_params"]["max_new_tokens"])]


class _Handler(BaseHTTPRequestHandler):
    ar: FaultyAR
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are written apart

    def setup(self) -> None:
        super().setup()
        self.ar.connections.add(self.connection)

    def finish(self) -> None:
        self.ar.connections.discard(self.connection)
        super().finish()

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer(200 if self.ar.healthy else 503, b"")
        elif self.ar.failing_looks > 0:
            self.ar.failing_looks -= 1
            self.answer(500, b"")
        elif self.ar.silent_looks:
            self.connection.recv(1)  # until it hangs up
            self.close_connection = True
        else:
            self.answer_json(
                {
                    "architectures": [self.ar.architecture],
                    "model_type": "some_model",
                    "model_path": self.ar.model_path,
                    "weight_version": self.ar.weight_version,
                    **self.ar.told,
                }
            )

    def do_POST(self) -> None:
        ar = self.ar
        size = int(self.headers["Content-Length"])
        body = json.loads(self.rfile.read(size))
        if body["sampling_params"]["max_new_tokens"] == PROBE_TOKENS:
            fault = FAULTS[ar.probe_fault] if ar.probe_fault else _Handler.answer_json
            fault(self, {"output_ids": ar.ids(body), "meta_info": {}})
            return
        with ar.lock:
            ar.requests.append(body)
            ar.sizes.append(size)
            ar.waiting += 1
            ar.most_waiting = max(ar.waiting, ar.most_waiting)
            fault = ar.faults.pop(0) if ar.faults else ar.always
        time.sleep(ar.seconds)
        ar.may_answer.wait()
        with ar.lock:  # before the answer: its client may ask again at once
            ar.waiting -= 1
        try:
            meta = {"prompt_tokens": 9, "weight_version": ar.weight_version}
            good = {"output_ids": ar.ids(body), "meta_info": meta}
            (FAULTS[fault] if fault else _Handler.answer_json)(self, good)
        except OSError:
            ar.gone += 1

    def answer_json(self, value: Any, status: int = 200) -> None:
        self.answer(status, json.dumps(value).encode())

    def answer(self, status: int, body: bytes, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def break_off(self) -> None:
        """Reset the connection."""
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()
        self.close_connection = True

    def log_message(self, *_args) -> None:
        pass


def _silent(handler: _Handler, _good: dict) -> None:
    """Accepts, and never answers; ends when the client hangs up."""
    handler.connection.recv(1)
    raise OSError


def _slow(handler: _Handler, good: dict) -> None:
    time.sleep(0.4)
    handler.answer_json(good)


def _trickle(handler: _Handler, good: dict) -> None:
    """A byte now and then, for ever."""
    handler.answer(200, b" ", length=10_000)
    for _ in range(200):
        time.sleep(0.1)
        handler.wfile.write(b" ")
        handler.wfile.flush()


def _reset(handler: _Handler, _good: dict) -> None:
    handler.break_off()


def _half(handler: _Handler, good: dict) -> None:
    text = json.dumps(good).encode()
    handler.answer(200, text[: len(text) // 2], length=len(text))
    handler.close_connection = True


def _half_unnoticed(handler: _Handler, good: dict) -> None:
    text = json.dumps(good).encode()
    handler.answer(200, text[: len(text) // 2])


def _with(change: Callable[[dict], Any]) -> Callable[[_Handler, dict], None]:
    return lambda handler, good: handler.answer_json(change(good))


def _status(status: int) -> Callable[[_Handler, dict], None]:
    return lambda handler, _good: handler.answer_json({"error": f"status {status}"}, status)


FAULTS: dict[str, Callable[[_Handler, dict], None]] = {
    "silent": _silent,
    "slow": _slow,
    "trickle": _trickle,
    "reset": _reset,
    "half": _half,
    "half unnoticed": _half_unnoticed,
    "html": lambda handler, _good: handler.answer(200, b"<html>It works!</html>"),
    "list": _with(lambda good: [good]),
    "no ids": _with(lambda good: {"text": "a cat"}),
    "too few ids": _with(lambda good: {**good, "output_ids": good["output_ids"][:9]}),
    "id out of range": _with(
        lambda good: {**good, "output_ids": [*good["output_ids"][:-2], CODEBOOK, 0]}
    ),
    "id that is no number": _with(lambda good: {**good, "output_ids": ["a"] * 300}),
    "aborted": _with(
        lambda good: {**good, "meta_info": {"finish_reason": {"type": "abort", "message": "oom"}}}
    ),
    "400": _status(400),
    "404": _status(404),
    "500": _status(500),
    "502": _status(502),
    "503": _status(503),
    "504": _status(504),
}

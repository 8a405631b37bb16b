"""`Server`: `sglang serve` as a user starts it, on a port of its own."""

import base64
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from openai import APIStatusError, OpenAI
from PIL import Image

from harness.processes import UPSTREAM_ONLY, free_ports, stop, tail, test_environment

FP32_FLAGS = ("--dit-precision", "fp32", "--vae-precision", "fp32")
AR_CPU_FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--skip-server-warmup"),
    "--sleep-on-idle",  # or it spins a core
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
    *("--image-processor-backend", "pil", "--max-total-tokens", "65536"),
    *("--max-running-requests", "8"),
)
START_SECONDS = 480
REQUEST_SECONDS = 300


def serve_command(model: Path, *flags: str) -> list[str]:
    port, scheduler_port, master_port = free_ports(3)
    sglang = str(Path(sys.executable).parent / "sglang")
    return [
        *(sglang, "serve", "--model-path", str(model)),
        *(() if "--warmup-mode" in flags else ("--warmup-mode", "off")),
        "--sleep-on-idle",  # or each idle server spins a core
        *("--port", str(port), "--scheduler-port", str(scheduler_port)),
        *("--master-port", str(master_port), *flags),
    ]


def ar_command(
    model: Path, *flags: str, port: int | None = None, honours_seeds: bool = True
) -> list[str]:
    """GLM-Image's AR half over SRT, on a CPU."""
    port = port or free_ports(1)[0]
    sglang = str(Path(sys.executable).parent / "sglang")
    return [
        *(sglang, "serve", "--model-path", str(model / "vision_language_encoder")),
        *("--tokenizer-path", str(model / "processor"), "--enable-multimodal"),
        *("--port", str(port), *AR_CPU_FLAGS, *flags),
        *(("--enable-deterministic-inference",) if honours_seeds else ()),
    ]


def start_script(name: str, model: Path, **settings: str) -> dict[str, Any]:
    """How `Server` starts one of examples/glm_image, on a CPU. Keywords of `Server`."""
    # the scripts count up from their port by themselves
    port = free_ports(1)[0]
    script = Path(__file__).parents[2] / "examples" / "glm_image" / name
    return {
        "command": ["bash", str(script)],
        "port": port,
        "env": {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "MODEL": str(model),
            "PORT": str(port),
            "AR_FLAGS": " ".join(AR_CPU_FLAGS),
            "DIFFUSION_FLAGS": " ".join((*FP32_FLAGS, "--sleep-on-idle", "--warmup-mode", "off")),
            **settings,
        },
    }


class HTTPFailure(Exception):
    def __init__(self, status: int, body: str):
        super().__init__(f"{status}: {body}")
        self.status = status
        self.body = body


class Server:
    """Starts at once; usable as a context manager."""

    def __init__(
        self,
        model: Path,
        *flags: str,
        upstream: bool = False,
        command: list[str] | None = None,
        port: int | None = None,
        env: Mapping[str, str] | None = None,
        waits: bool = True,
    ):
        """
        Args:
            upstream: with the plugin off (a CPU host keeps the two missing ops).
            command: instead of `serve_command`.
            port: of a command that does not name it.
            waits: until it answers; or call `wait` later, with others starting beside it.
        """
        self._dir = tempfile.TemporaryDirectory(prefix="server-")
        self.log = Path(self._dir.name) / "log"
        self._command = command or serve_command(model, "--output-path", self._dir.name, *flags)
        self.port = port or int(self._command[self._command.index("--port") + 1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._log_file = self.log.open("w")
        self._environment = test_environment(UPSTREAM_ONLY if upstream else {}, env or {})
        self.start()
        if waits:
            self.wait()

    def start(self) -> None:
        """Again, after `kill`."""
        self.process = subprocess.Popen(
            self._command,
            stdout=self._log_file,
            stderr=subprocess.STDOUT,
            env=self._environment,
            start_new_session=True,
        )

    def kill(self) -> None:
        """SIGKILL, to it and to all that it started."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait(self) -> None:
        """Until it answers."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                self.get("/health")
                return
            except (HTTPFailure, OSError):
                time.sleep(0.3)
        log = tail(self.log)
        self.close()
        raise RuntimeError(f"the server did not start:\n{log}")

    def get(self, path: str) -> str:
        return self._send(urllib.request.Request(self.url + path))

    def post(
        self, path: str, body: Mapping[str, Any], timeout: float = REQUEST_SECONDS
    ) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        return json.loads(self._send(request, timeout))

    def generate(self, timeout: float = REQUEST_SECONDS, **body: Any) -> dict[str, Any]:
        """POST /v1/images/generations. Raises `HTTPFailure`."""
        return self.post(
            "/v1/images/generations",
            {
                "prompt": "a cat",
                "size": "64x64",
                "num_inference_steps": 6,
                "seed": 7,
                "response_format": "b64_json",
                "output_format": "png",
                **body,
            },
            timeout,
        )

    def edit(
        self, images: list[bytes], timeout: float = REQUEST_SECONDS, **fields: Any
    ) -> dict[str, Any]:
        """POST /v1/images/edits with PNG files. Raises `HTTPFailure`."""
        fields = {
            "prompt": "a cat",
            "num_inference_steps": 6,
            "seed": 7,
            "response_format": "b64_json",
            "output_format": "png",
            **fields,
        }
        client = OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=timeout)
        files = [(f"{i}.png", image) for i, image in enumerate(images)]
        try:
            answer = client.images.edit(
                image=files, prompt=fields.pop("prompt"), extra_body=fields
            )
        except APIStatusError as error:
            raise HTTPFailure(error.status_code, error.response.text) from None
        return answer.model_dump()

    def _send(self, request: urllib.request.Request, timeout: float = REQUEST_SECONDS) -> str:
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return response.read().decode()
        except urllib.error.HTTPError as error:
            raise HTTPFailure(error.code, error.read().decode()) from None

    def close(self) -> None:
        stop(self.process)
        self._log_file.close()
        self._dir.cleanup()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_exc) -> None:
        self.close()


def wait_for_health(server: Server, wanted: Mapping[str, Any]) -> None:
    """Until `/health` answers `wanted`; on the way it may tell of a connection that was cut."""
    deadline = time.monotonic() + START_SECONDS
    while (health := json.loads(server.get("/health"))) != wanted:
        assert time.monotonic() < deadline, health
        time.sleep(0.2)


def pngs(response: Mapping[str, Any]) -> list[bytes]:
    return [base64.b64decode(image["b64_json"]) for image in response["data"]]


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)


def source_image(width: int = 64, height: int = 64, shade: int = 2) -> bytes:
    """A PNG file; another `shade` is another picture."""
    data = io.BytesIO()
    pattern = np.indices((height, width, 3)).sum(0) * shade
    Image.fromarray(pattern.astype(np.uint8)).save(data, "PNG")
    return data.getvalue()

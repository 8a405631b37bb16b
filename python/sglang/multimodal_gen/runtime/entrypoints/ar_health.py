# SPDX-License-Identifier: Apache-2.0
"""The AR server's part of ``/health``: without one, or with another model's, a server is degraded,
not dead.
"""

import asyncio
import time
from typing import Any

import aiohttp
from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from transformers import AutoProcessor, PretrainedConfig

from sglang.multimodal_gen.configs.glm_image_prior import PriorConfig
from sglang.multimodal_gen.runtime.entrypoints import http_server
from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.glm_image_prior import (  # noqa: E501
    ARServerUnfit,
    Expected,
    ServerFacts,
    ServerLook,
    check_architecture,
    check_server,
    model_info,
    model_of,
)

_FRESH_S = 1.0  # an orchestrator that asks often does not pass it on
_TIMEOUT_S = 10.0  # SRT sleeps for a second before it answers, and may be busy


class ARHealth:
    """What is wrong with the AR server, asked for beside `/health`, at most once a second.

    `/health` itself never waits for it: an orchestrator's own timeout may be a second.
    """

    def __init__(self, config: PriorConfig, model_path: str):
        """
        Args:
            model_path: of the checkpoint whose DiT takes the tokens.
        """
        self._config = config
        self._model_path = model_path
        self._look: ServerLook | None = None
        self._cause: str | None = None  # it was up at start
        self._asked = float("-inf")
        self._refresh: asyncio.Task | None = None

    def cause(self) -> str | None:
        """As it was when last asked: None where the AR server is up, with the right model."""
        idle = self._refresh is None or self._refresh.done()
        if idle and time.monotonic() - self._asked > _FRESH_S:
            self._refresh = asyncio.create_task(self._ask_again())
        return self._cause

    async def _ask_again(self) -> None:
        self._cause = await self._ask()
        self._asked = time.monotonic()

    async def _ask(self) -> str | None:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(self._config.url + "/health") as response,
            ):
                if response.status != 200:
                    return f"answers {response.status}"
            return await asyncio.to_thread(self._other_model)
        except TimeoutError:
            return f"silent for {_TIMEOUT_S:g} s"
        except aiohttp.ClientError as error:
            return str(error) or type(error).__name__

    def _other_model(self) -> str | None:
        """What is wrong with the model that the AR server has now."""
        try:
            if self._look is None:  # the process that asks for tokens checked the rest of it
                info = model_info(self._config)
                check_architecture(self._config, info)
                self._look = ServerLook(self._config, self._check, model_of(info))
            else:
                self._look.again()
        except ARServerUnfit as error:
            return error.cause
        return None

    def _check(self) -> ServerFacts:
        processor = AutoProcessor.from_pretrained(self._model_path, subfolder="processor")
        transformer, _ = PretrainedConfig.get_config_dict(
            self._model_path, subfolder="transformer"
        )
        codebook = transformer["prior_vq_quantizer_codebook_size"]
        return check_server(self._config, Expected.of(processor, codebook))


def add_health_route(app: FastAPI, config: PriorConfig, model_path: str) -> None:
    """Serve ``/health`` and ``/health_generate``: upstream's answer, or 200 and "degraded"."""
    health = ARHealth(config, model_path)

    async def health_with_ar_server(request: Request) -> Any:
        answer = await http_server.health(request)
        if answer != {"status": "ok"}:
            return answer
        cause = health.cause()
        if cause is None:
            return answer
        return {"status": "degraded", "ar_server": {"url": config.shown_url, "error": cause}}

    for path in ("/health", "/health_generate"):
        app.router.routes.insert(0, APIRoute(path, health_with_ar_server, methods=["GET"]))

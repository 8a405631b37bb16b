# SPDX-License-Identifier: Apache-2.0
"""Prior tokens for requests: asked for at once, each one ready when its own tokens are there."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from sglang.multimodal_gen.configs.glm_image_prior import PriorConfig
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.glm_image import (
    GlmImageAR,
    _merge_srt_usages,
)

from .answer import PriorTokens, read_answer
from .cache import BoundedCache
from .client import ARClient
from .metrics import PriorMetrics
from .request import Prepared, PriorRequest, prepare
from .server_check import UNSEEDED_WARNING, ServerFacts
from .watch import ServerLook, ServerWatch

_MAX_EARLY = 4096  # futures of requests that nobody came for


@dataclass(frozen=True, kw_only=True)
class Prior:
    """What the AR stage leaves on a request. On the host.

    Attributes:
        token_ids_BL: one row an image, L = height · width / 16².
        source_token_ids: of each source image, [height · width / 16²]; None without one.
        height, width: of what is denoised, multiples of 32.
        wanted_size: (width, height) of the picture.
        usages: of the AR server, one an image.
        seconds: from the request to its last token.
        warning: for the response of a request with a seed, or None.
    """

    token_ids_BL: torch.Tensor
    source_token_ids: list[torch.Tensor] | None
    height: int
    width: int
    wanted_size: tuple[int, int]
    usages: list[dict[str, int]]
    seconds: float
    warning: str | None


class PriorService:
    """One a process that asks. It is called from one thread; futures are done on another."""

    def __init__(
        self,
        config: PriorConfig,
        *,
        processor: Any,
        codebook: int,
        sampling: Mapping[str, float],
        facts: ServerFacts,
        check: Callable[[], ServerFacts],
        server_metrics: Any | None = None,
    ):
        """
        Args:
            processor: GLM-Image's, as transformers loads it.
            codebook: how many codes the DiT knows.
            sampling: see `sampling_of`.
            facts: what the AR server told at start.
            check: what it tells now; blocking, raises `ARServerUnfit`.
            server_metrics: upstream's `DiffusionMetrics`, or None.
        """
        self._processor = processor
        self._codebook = codebook
        self._sampling = sampling
        self._metrics = PriorMetrics(server_metrics)
        self._watch = ServerWatch(ServerLook(config, check, facts.model), facts)
        self._client = ARClient(config, self._metrics, self._watch)
        self._cache: BoundedCache[PriorTokens] = BoundedCache(config.cache_size)
        self._counts_cache = config.cache_size > 0
        # the tokenizer is not for two threads at a time, and one keeps the order
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="glm-image-prior-build")
        self._early: OrderedDict[tuple[str, PriorRequest], Future] = OrderedDict()

    def fetch(self, requests: list[Req]) -> Future:
        """A `Prior` for each request to come, or the first one's `PriorError`.

        Asked for now, or since `fetch_early`. Cancelling the future takes them off the AR server.
        """
        futures = []
        for req in requests:
            request = PriorRequest.of(req)
            early = self._early.pop((req.request_id, request), None)
            futures.append(early or self.ask(request))
        return self._client.submit(_all(futures))

    def ask(self, request: PriorRequest) -> Future:
        """The `Prior` of one request to come, or its `PriorError`."""
        return self._client.submit(self._prior_of(request))

    def fetch_early(self, req: Req) -> None:
        """Ask now for a request that `fetch` is called with later."""
        request = PriorRequest.of(req)
        self._early[req.request_id, request] = self.ask(request)
        if len(self._early) > _MAX_EARLY:
            self._early.popitem(last=False)[1].cancel()

    def close(self) -> None:
        self._client.close()
        self._builder.shutdown(wait=False, cancel_futures=True)

    async def _prior_of(self, request: PriorRequest) -> Prior:
        start = time.monotonic()
        loop = asyncio.get_running_loop()
        prepared = await loop.run_in_executor(
            self._builder,
            prepare,
            request,
            self._processor,
            self._codebook,
            self._watch.facts.context,
            self._sampling,
        )
        tasks = [asyncio.create_task(self._tokens(prepared, seed)) for seed in request.seeds]
        try:
            tokens = await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # of one that failed, or of nobody's any more
                task.cancel()
        warning = None if self._watch.facts.honours_seeds else UNSEEDED_WARNING
        return assemble(prepared, tokens, time.monotonic() - start, warning)

    async def _tokens(self, prepared: Prepared, seed: int | None) -> PriorTokens:
        caches = seed is not None and self._counts_cache
        if caches:
            await self._watch.refresh()
            known = self._cache.get(self._key(prepared, seed))
            self._metrics.cached(known is not None)
            if known is not None:
                return known
        tokens = await self._client.generate(
            lambda: prepared.body(seed), lambda body: read_answer(body, prepared.wanted)
        )
        if caches and await self._watch.wrote(tokens.weight_version):
            self._cache.put(self._key(prepared, seed), tokens)
        return tokens

    def _key(self, prepared: Prepared, seed: int) -> tuple:
        facts = self._watch.facts
        return facts.model, facts.honours_seeds, prepared.key, seed


async def _all(futures: list[Future]) -> list[Prior]:
    return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))


def assemble(
    prepared: Prepared, tokens: list[PriorTokens], seconds: float, warning: str | None
) -> Prior:
    """The tensors of a request from the codes of its images."""
    rows = [upsample(image.codes, prepared.token_h, prepared.token_w) for image in tokens]
    sources = [
        upsample(codes, *grid).squeeze(0)
        for codes, grid in zip(tokens[0].source_codes, prepared.source_grids)
    ]
    return Prior(
        token_ids_BL=torch.cat(rows),
        source_token_ids=sources or None,
        height=prepared.height,
        width=prepared.width,
        wanted_size=prepared.wanted_size,
        usages=[image.usage for image in tokens],
        seconds=seconds,
        warning=warning,
    )


def upsample(codes: tuple[int, ...], token_h: int, token_w: int) -> torch.Tensor:
    """Each code twice along both sides: [1, 4 · token_h · token_w]."""
    return GlmImageAR._upsample_token_ids(torch.tensor(codes), token_h, token_w)


def assign_prior(req: Req, prior: Prior) -> None:
    """Leave on `req` what upstream's AR stage would."""
    if req.requested_width is None:
        req.requested_width = prior.wanted_size[0]
    if req.requested_height is None:
        req.requested_height = prior.wanted_size[1]
    req.height, req.width = prior.height, prior.width
    req.prior_token_id = prior.token_ids_BL
    req.prior_token_image_ids = prior.source_token_ids
    req.extra["usage_by_output"] = prior.usages
    req.usage = _merge_srt_usages(prior.usages)
    if req.metrics is not None:
        req.metrics.record_stage("GlmImageAR", prior.seconds)
    if prior.warning is not None and "seed" in _explicit_fields(req):
        warn(req, prior.warning)


def warn(req: Req, text: str) -> None:
    """A warning for the request's response; in `extra` it also reaches a denoiser."""
    req.extra["warnings"] = [text]
    if req.metrics is not None:
        req.metrics.warnings = [text]


def _explicit_fields(req: Req) -> Any:
    return getattr(req.sampling_params, "_explicit_fields", None) or ()

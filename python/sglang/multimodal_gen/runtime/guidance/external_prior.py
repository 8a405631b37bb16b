# SPDX-License-Identifier: Apache-2.0
"""GLM-Image's prior tokens from an AR server, fetched beside the step loop.

A request waits for its own tokens while the samples that run go on; rank 0 alone asks the server,
and hands the tokens to the other ranks with the decision that lets the request join.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.glm_image import (
    GlmImageAR,
    _merge_srt_usages,
    _seed_for_output,
)

_MAX_IN_FLIGHT = 16


@dataclass(frozen=True)
class Prior:
    """``token_ids_BL`` on the host, and what the AR server says it used, an entry an image."""

    token_ids_BL: torch.Tensor
    usages: list[dict[str, int] | None]


class PriorFetcher:
    """Asks the AR server for the prior of each request that needs nothing else from it."""

    def __init__(self, stage: GlmImageAR, server_args: Any):
        self._stage = stage
        self._server_args = server_args
        self._pool = ThreadPoolExecutor(_MAX_IN_FLIGHT, thread_name_prefix="glm-image-prior")

    def fetch(self, req: Req) -> Future | None:
        """The prior to come, or None where the stage itself has to run (a source image)."""
        if not isinstance(req.prompt, str) or req.image_path is not None:
            return None
        if req.width is None or req.height is None:
            return None
        images = max(1, int(req.num_outputs_per_prompt or 1))
        return self._pool.submit(
            self._ask,
            [req.prompt] * images,
            [_seed_for_output(req.seed, image) for image in range(images)],
            req.height,
            req.width,
        )

    def _ask(self, prompts: list[str], seeds: list, height: int, width: int) -> Prior:
        token_ids, usages = self._stage.generate_prior_tokens_batch(
            prompts=prompts,
            seeds=seeds,
            height=height,
            width=width,
            server_args=self._server_args,
            device=torch.device("cpu"),
        )
        return Prior(torch.cat(token_ids), usages)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def build_prior_fetcher(stages: list, server_args: Any) -> PriorFetcher | None:
    """For a pipeline that begins with GLM-Image's AR stage and asks a server for it."""
    if server_args.srt_encoder_url is None or not isinstance(stages[0], GlmImageAR):
        return None
    return PriorFetcher(stages[0], server_args)


def assign_prior(req: Req, prior: Prior) -> None:
    """What the AR stage leaves on a request."""
    req.prior_token_id = prior.token_ids_BL
    req.prior_token_image_ids = None
    req.extra["usage_by_output"] = prior.usages
    usage = _merge_srt_usages(prior.usages)
    if usage is not None:
        req.usage = usage

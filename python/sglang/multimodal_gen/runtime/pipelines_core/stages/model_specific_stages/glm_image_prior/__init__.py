# SPDX-License-Identifier: Apache-2.0
"""GLM-Image's prior tokens from an AR server of SRT.

`PriorService` asks for each request as it comes, without a barrier between requests: `request`
makes what is sent (`sampling` says how ids are drawn), `client` sends it (`retry` decides about
another attempt), `answer` checks what comes back, `cache` keeps it. `server_check` looks at the AR
server before requests come, `watch` notices when it is another one.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from sglang.multimodal_gen.configs.glm_image_prior import PriorConfig, PriorError

from .request import PriorRequest, check_request
from .sampling import sampling_of
from .server_check import (
    ARServerLost,
    ARServerUnfit,
    Expected,
    ServerFacts,
    check_architecture,
    check_server,
    model_info,
    model_of,
    wait_for_server,
)
from .service import Prior, PriorService, assign_prior
from .watch import ServerLook

__all__ = [
    "ARServerLost",
    "ARServerUnfit",
    "Expected",
    "Prior",
    "PriorError",
    "PriorRequest",
    "PriorService",
    "ServerFacts",
    "ServerLook",
    "assign_prior",
    "build_service",
    "check_architecture",
    "check_request",
    "check_server",
    "model_info",
    "model_of",
    "sampling_of",
    "wait_for_server",
]


def build_service(
    config: PriorConfig,
    *,
    processor: Any,
    codebook: int,
    sampling: Mapping[str, float],
    server_metrics: Any | None,
) -> PriorService:
    """Check the AR server and make a service that asks it; see `PriorService` for the arguments.

    Raises:
        ARServerUnfit: see `check_server`.
    """
    check = partial(check_server, config, Expected.of(processor, codebook))
    return PriorService(
        config,
        processor=processor,
        codebook=codebook,
        sampling=sampling,
        facts=check(timeout_s=config.start_timeout_s),  # the first request may take long
        check=check,
        server_metrics=server_metrics,
    )

# SPDX-License-Identifier: Apache-2.0
"""GLM-Image's prior tokens from an AR server of SRT.

`PriorService` asks for each request as it comes, without a barrier between requests: `request`
makes what is sent, `client` sends it (`retry` decides about another attempt), `answer` checks what
comes back, `cache` keeps it. `server_check` looks at the AR server before requests come.
"""

from typing import Any

from sglang.multimodal_gen.configs.glm_image_prior import PriorConfig, PriorError

from .request import PriorRequest, check_size
from .server_check import ARServerUnfit, ServerFacts, check_server, wait_for_server
from .service import Prior, PriorService, assign_prior

__all__ = [
    "ARServerUnfit",
    "Prior",
    "PriorError",
    "PriorRequest",
    "PriorService",
    "ServerFacts",
    "assign_prior",
    "build_service",
    "check_server",
    "check_size",
    "wait_for_server",
]


def build_service(
    config: PriorConfig, *, processor: Any, codebook: int, server_metrics: Any | None
) -> PriorService:
    """Check the AR server and make a service that asks it; see `PriorService` for the arguments.

    Raises:
        ARServerUnfit: see `check_server`.
    """
    facts = check_server(config, processor=processor, codebook=codebook)
    return PriorService(
        config,
        processor=processor,
        codebook=codebook,
        facts=facts,
        server_metrics=server_metrics,
    )

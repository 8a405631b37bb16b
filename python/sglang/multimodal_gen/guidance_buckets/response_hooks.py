# SPDX-License-Identifier: Apache-2.0
"""Hooks on a result's way out: what was run rides on its RequestMetrics."""

from typing import Any

from sglang.multimodal_gen.configs.glm_image_prior import marked_status
from sglang.multimodal_gen.guidance_buckets.request_hooks import abort_when_disconnected

# attributes of RequestMetrics that the response shows
REPORTED = ("guidance", "warnings")


def add_report(response: dict[str, Any], *args, **kwargs) -> None:
    """AFTER image_api._build_image_response_kwargs."""
    result = kwargs["result"] if "result" in kwargs else args[4]
    for name in REPORTED:
        if (report := getattr(result.metrics, name, None)) is not None:
            response[name] = report


def report_in_metrics(data: dict[str, Any], metrics: Any) -> None:
    """AFTER RequestMetrics.to_dict."""
    for name in REPORTED:
        if (report := getattr(metrics, name, None)) is not None:
            data[name] = report


async def name_faults(original, scheduler_client: Any, batch: Any, **kwargs):
    """AROUND process_generation_batch, which makes a 500 of every error of the scheduler."""
    from fastapi import HTTPException

    try:
        return await abort_when_disconnected(original, scheduler_client, batch, **kwargs)
    except RuntimeError as error:
        marked = marked_status(str(error))
        if marked is None:
            raise
        raise HTTPException(*marked) from None

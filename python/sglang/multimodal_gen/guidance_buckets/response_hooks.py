# SPDX-License-Identifier: Apache-2.0
"""Hooks on a result's way out: what was run rides on its RequestMetrics."""

from typing import Any


def add_report(response: dict[str, Any], *args, **kwargs) -> None:
    """AFTER image_api._build_image_response_kwargs."""
    result = kwargs["result"] if "result" in kwargs else args[4]
    report = getattr(result.metrics, "guidance", None)
    if report is not None:
        response["guidance"] = report


def report_in_metrics(data: dict[str, Any], metrics: Any) -> None:
    """AFTER RequestMetrics.to_dict."""
    report = getattr(metrics, "guidance", None)
    if report is not None:
        data["guidance"] = report

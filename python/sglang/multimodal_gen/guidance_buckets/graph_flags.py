# SPDX-License-Identifier: Apache-2.0
"""The --bucket-graph-* flags: from a command line or keywords to a `BucketGraphConfig`."""

import argparse
from typing import Any

from sglang.multimodal_gen.configs.bucket_graphs import (
    DEFAULT_ROWS,
    DEFAULT_TEXT_LENGTHS,
    GRAPH_MODES,
    BucketGraphConfig,
    parse_resolution,
)
from sglang.multimodal_gen.configs.guidance_curves import GuidanceError

# argument name -> attribute of BucketGraphConfig
GRAPH_ARGUMENTS = {
    "bucket_graphs": "mode",
    "bucket_graph_rows": "rows",
    "bucket_graph_resolutions": "resolutions",
    "bucket_graph_text_lengths": "text_lengths",
    "bucket_graph_memory_gb": "memory_gb",
}


def add_graph_flags(group: Any) -> None:
    """To an argparse group. The defaults are None: only what a user gives is passed on."""
    group.add_argument(
        "--bucket-graphs",
        choices=GRAPH_MODES,
        help="CUDA graphs of a step's forward: full, breakable (attention runs eagerly between "
        "the pieces), off, or on where a capture was checked to pay (auto, default).",
    )
    group.add_argument(
        "--bucket-graph-rows",
        type=int,
        nargs="+",
        metavar="N",
        help="Row counts that graphs are captured for (default: "
        f"{' '.join(map(str, DEFAULT_ROWS))}, fewer for large images).",
    )
    group.add_argument(
        "--bucket-graph-resolutions",
        type=_resolution,
        nargs="+",
        metavar="WxH",
        help="Resolutions captured before the server is ready (default: those of "
        "--warmup-resolutions, or the model's own where the server warms up).",
    )
    group.add_argument(
        "--bucket-graph-text-lengths",
        type=int,
        nargs="+",
        metavar="N",
        help="Token counts that text of varying length is padded up to (default: "
        f"{' '.join(map(str, DEFAULT_TEXT_LENGTHS))}).",
    )
    group.add_argument(
        "--bucket-graph-memory-gb",
        type=float,
        metavar="GB",
        help="Device memory that graphs may take (default: a tenth of the card's).",
    )


def _resolution(text: str) -> str:
    try:
        parse_resolution(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def graph_config(given: dict[str, Any]) -> BucketGraphConfig:
    """From the arguments that were given.

    Raises:
        GuidanceError: naming the flag.
    """
    if given.get("bucket_graphs") == "off":
        for name in GRAPH_ARGUMENTS:
            if name in given and name != "bucket_graphs":
                flag = "--" + name.replace("_", "-")
                wanted = f"auto, full or breakable where {flag} is given"
                raise GuidanceError("--bucket-graphs", "off", wanted)
    values = {GRAPH_ARGUMENTS[name]: given[name] for name in GRAPH_ARGUMENTS if name in given}
    for name in ("rows", "resolutions", "text_lengths"):
        if isinstance(values.get(name), list):
            values[name] = tuple(values[name])
    return BucketGraphConfig(**values)


def graph_arguments(config: BucketGraphConfig) -> dict[str, Any]:
    """The arguments that `graph_config` makes the same settings of."""
    names = ["bucket_graphs"] if config.mode == "off" else GRAPH_ARGUMENTS
    return {name: getattr(config, GRAPH_ARGUMENTS[name]) for name in names}

# SPDX-License-Identifier: Apache-2.0
"""How GLM-Image's prior tokens are asked for, and the error of a request without; no torch."""

import argparse
import re
from dataclasses import dataclass, fields
from typing import Any

# in Req.extra from a head to its denoisers, data URLs or addresses of the source images
SOURCE_IMAGES_KEY = "source_images"

# of the answer of an AR server that has this project installed
SOURCE_TOKENS_KEY = "glm_image_source_tokens"  # in meta_info, a list of codes a source image


@dataclass(frozen=True, kw_only=True)
class PriorConfig:
    """The settings of the AR client; times are in seconds.

    Attributes:
        url: ``--srt-encoder-url``; None runs the AR model in the same process.
        max_inflight: ``--srt-encoder-max-inflight``, requests at the AR server at a time.
        connect_timeout_s: ``--srt-encoder-connection-timeout``, for one TCP connection.
        read_timeout_s: ``--srt-encoder-timeout``, for one attempt while nothing arrives.
        total_timeout_s: ``--srt-encoder-total-timeout``, for all of one request: waiting for
            its turn, and every attempt.
        start_timeout_s: ``--srt-encoder-start-timeout``, for the AR server to be up at start.
        cache_size: ``--prior-cache-size``, answers kept on the host; 0 is off.
    """

    url: str | None = None
    max_inflight: int = 64
    connect_timeout_s: float = 3.05
    read_timeout_s: float = 100.0
    total_timeout_s: float = 300.0
    start_timeout_s: float = 600.0
    cache_size: int = 256

    @property
    def shown_url(self) -> str | None:
        """The url without its user and password, for messages and logs."""
        return self.url and re.sub(r"//[^/@]*@", "//", self.url)

    def __post_init__(self):
        for name in ("connect_timeout_s", "read_timeout_s", "total_timeout_s", "start_timeout_s"):
            _check(getattr(self, name) > 0, name, getattr(self, name), "a time above 0")
        _check(self.max_inflight >= 1, "max_inflight", self.max_inflight, "1 or more")
        _check(self.cache_size >= 0, "cache_size", self.cache_size, "0 or more")


# argument name -> (attribute of PriorConfig, type, help); upstream has flags for the other three
NEW_ARGUMENTS: dict[str, tuple[str, type, str]] = {
    "srt_encoder_max_inflight": (
        "max_inflight",
        int,
        "Requests for prior tokens at the AR server at a time; the rest wait in order",
    ),
    "srt_encoder_total_timeout": (
        "total_timeout_s",
        float,
        "Seconds that one request may take at the AR server, retries included",
    ),
    "srt_encoder_start_timeout": (
        "start_timeout_s",
        float,
        "Seconds to wait for the AR server at start-up",
    ),
    "prior_cache_size": (
        "cache_size",
        int,
        "GLM-Image: prior tokens of so many requests (prompt, size, seed, source images) are kept "
        "in host memory. 0 is off",
    ),
}

_FLAGS = {attribute: name for name, (attribute, _, _) in NEW_ARGUMENTS.items()} | {
    "connect_timeout_s": "srt_encoder_connection_timeout",
    "read_timeout_s": "srt_encoder_timeout",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that upstream lacks. Defaults are None: only what a user gives is passed on."""
    group = parser.add_argument_group("GLM-Image prior tokens")
    defaults = {field.name: field.default for field in fields(PriorConfig)}
    for name, (attribute, kind, text) in NEW_ARGUMENTS.items():
        group.add_argument(
            "--" + name.replace("_", "-"),
            type=kind,
            metavar="N" if kind is int else "SECONDS",
            help=f"{text} (default: {defaults[attribute]:g}).",
        )


def prior_config(server_args: Any) -> PriorConfig | None:
    """The server's settings, or None where it keeps upstream's client.

    Ours is used with ``--guidance-buckets``, or where one of `NEW_ARGUMENTS` is given.
    """
    return getattr(server_args, "prior_config", None)


def make_prior_config(server_args: Any, given: dict[str, Any]) -> PriorConfig:
    """From upstream's values on `server_args` and those of `NEW_ARGUMENTS` that were given.

    Raises:
        ValueError: naming the flag.
    """
    for name in given if server_args.srt_encoder_url is None else ():
        _check(False, NEW_ARGUMENTS[name][0], given[name], "--srt-encoder-url beside it")
    if server_args.srt_encoder_url is not None and server_args.batching_max_size > 1:
        raise ValueError(
            f"--batching-max-size: got {server_args.batching_max_size}, wanted 1 beside "
            "--srt-encoder-url: the AR server batches by itself, and a group would fail together"
        )
    return PriorConfig(
        url=server_args.srt_encoder_url and server_args.srt_encoder_url.rstrip("/"),
        connect_timeout_s=server_args.srt_encoder_connect_timeout,
        read_timeout_s=server_args.srt_encoder_timeout,
        **{NEW_ARGUMENTS[name][0]: value for name, value in given.items()},
    )


def prior_arguments(server_args: Any) -> dict[str, Any]:
    """The keywords that make `make_prior_config` give the same settings again."""
    config = prior_config(server_args)
    if config is None or config.url is None:
        return {}
    return {name: getattr(config, attribute) for name, (attribute, _, _) in NEW_ARGUMENTS.items()}


def _check(holds: bool, attribute: str, given: Any, wanted: str) -> None:
    if not holds:
        flag = "--" + _FLAGS[attribute].replace("_", "-")
        raise ValueError(f"{flag}: got {given!r}, wanted {wanted}")


class PriorError(RuntimeError):
    """A request without prior tokens.

    Its text carries its status: errors cross from the scheduler to the HTTP server as text.

    Attributes:
        status: 502 or 504 for the AR server's fault, 400 for the request's.
    """

    def __init__(self, status: int, subject: str, cause: str):
        """
        Args:
            subject: ``AR server URL``, ``source image N`` or ``size WxH``.
        """
        super().__init__(f"{subject}: {cause} (HTTP {status})")
        self.status = status
        self._arguments = (status, subject, cause)

    def __reduce__(self):  # ranks tell each other
        return PriorError, self._arguments


_MARKED = re.compile(
    r"(?P<message>(?:AR server \S+|source image \d+|size \d+x\d+): .*) "
    r"\(HTTP (?P<status>400|502|504)\)",
    re.DOTALL,
)


def marked_status(text: str) -> tuple[int, str] | None:
    """Status and message of the `PriorError` whose text is inside `text`, if one is."""
    match = _MARKED.search(text)
    return None if match is None else (int(match["status"]), match["message"])

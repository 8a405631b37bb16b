# SPDX-License-Identifier: Apache-2.0
"""What is asked of the AR server before requests come, and when it may be another one: is it up, is
it the right model, does it honour seeds. Blocking.
"""

import time
from dataclasses import dataclass
from typing import Any

import requests
from transformers import PretrainedConfig

from sglang.multimodal_gen.configs.glm_image_prior import PriorConfig
from sglang.multimodal_gen.runtime.utils.logging_utils import init_logger

from .answer import Wanted, read_answer
from .request import PriorRequest, prepare
from .retry import AttemptFailure

logger = init_logger(__name__)

_POLL_S = 1.0
_HEALTH_S = 10.0  # SRT sleeps for a second before it answers, and may be busy
_PROGRESS_S = 5.0
_PROBE_TOKENS = 16  # equal by chance once in many requests, if seeds are ignored
_PROBE_SEED = 7
ARCHITECTURE = "GlmImageForConditionalGeneration"

UNSEEDED_WARNING = (
    "seed: the AR server ignores seeds, so the same request may give another image "
    "(start it with --enable-deterministic-inference)"
)


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """What an AR server told.

    Attributes:
        honours_seeds: whether it gives the same tokens for the same seed.
        context: most tokens of a prompt and its picture; None where that cannot be known.
        model: path and version of the weights, as the server names them.
    """

    honours_seeds: bool
    context: int | None
    model: tuple[str | None, str | None]

    @property
    def weight_version(self) -> str | None:
        return self.model[1]


class ARServerUnfit(RuntimeError):
    """The AR server serves something else; the message says what.

    Attributes:
        cause: the message without the server's name.
    """

    def __init__(self, config: PriorConfig, cause: str):
        super().__init__(f"AR server {config.shown_url} {cause}")
        self.cause = cause


class ARServerLost(ARServerUnfit):
    """The AR server is not there, or went away while it was looked at."""


class ARServerUntold(ARServerLost):
    """Something is there, but says 5xx or nothing: a router whose server there is dead or stuck."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What an AR server has to be for a checkpoint.

    Attributes:
        codebook: how many codes the DiT knows.
        image_token_id, image_start_token_id: of the checkpoint's tokenizer.
        probe: the body of a request for `_PROBE_TOKENS` ids.
    """

    codebook: int
    image_token_id: int
    image_start_token_id: int
    probe: bytes

    @classmethod
    def of(cls, processor: Any, codebook: int) -> "Expected":
        """
        Args:
            processor: GLM-Image's, as transformers loads it.
        """
        request = PriorRequest(prompt="a", height=32, width=32, seeds=(_PROBE_SEED,), sources=())
        # draws from all ids: from the few likely ones, two seeds might give the same by chance
        prepared = prepare(request, processor, codebook)
        prepared.payload["sampling_params"]["max_new_tokens"] = _PROBE_TOKENS
        return cls(
            codebook=codebook,
            image_token_id=processor.image_token_id,
            image_start_token_id=processor.tokenizer.convert_tokens_to_ids(processor.bos_token),
            probe=prepared.body(_PROBE_SEED),
        )


def wait_for_server(config: PriorConfig, *, tells: bool = True) -> None:
    """Return when ``/health`` answers 200.

    Args:
        tells: log the progress, on one rank of several.

    Raises:
        ARServerLost: after `start_timeout_s`.
    """
    start = time.monotonic()
    told = start
    while True:
        cause = _unhealthy(config)
        waited = time.monotonic() - start
        if cause is None:
            if tells:
                logger.info("AR server %s is up (waited %.1f s)", config.shown_url, waited)
            return
        if waited >= config.start_timeout_s:
            raise ARServerLost(
                config,
                f"is not up after {config.start_timeout_s:g} s "
                f"(--srt-encoder-start-timeout): {cause}",
            )
        if tells and (waited < _POLL_S or time.monotonic() - told >= _PROGRESS_S):
            told = time.monotonic()
            logger.info(
                "Waiting for AR server %s: %.0f of %g s (%s)",
                config.shown_url,
                waited,
                config.start_timeout_s,
                cause,
            )
        time.sleep(_POLL_S)


def _unhealthy(config: PriorConfig) -> str | None:
    try:
        timeout = (config.connect_timeout_s, _HEALTH_S)
        status = requests.get(config.url + "/health", timeout=timeout).status_code
    except requests.Timeout:
        return "no answer"
    except requests.RequestException:
        return "no connection"
    return None if status == 200 else f"answered {status}"


def check_server(
    config: PriorConfig, expected: Expected, *, timeout_s: float | None = None
) -> ServerFacts:
    """Look at the AR server, which must be up.

    Its codebook and image token ids are compared where its model's config can be read from here.
    Anyway it has to answer a short request with ids of the DiT's codebook.

    Args:
        timeout_s: for that answer, where it is not `config.read_timeout_s`.

    Raises:
        ARServerUnfit: for another model, or one whose codes the DiT does not know.
        ARServerLost: where it goes away meanwhile.
        ARServerUntold: where it answers no more.
    """
    info = model_info(config)
    check_architecture(config, info)
    context = _check_config(config, str(info.get("model_path")), expected)
    timeout_s = timeout_s or config.read_timeout_s
    honours_seeds = len({_probe(config, expected, timeout_s) for _ in range(2)}) == 1
    if not honours_seeds:
        logger.warning("%s: %s", config.shown_url, UNSEEDED_WARNING)
    return ServerFacts(
        honours_seeds=honours_seeds,
        context=_told_context(config) or context,
        model=model_of(info),
    )


def check_architecture(config: PriorConfig, info: dict[str, Any]) -> None:
    """
    Raises:
        ARServerUnfit: where `info` is of another kind of model.
    """
    told = info.get("architectures")
    if not isinstance(told, list) or ARCHITECTURE not in told:
        served = info.get("model_type") or info.get("model_path")
        raise ARServerUnfit(config, f"serves {served}, not GLM-Image's AR")


def model_of(info: dict[str, Any]) -> tuple[str | None, str | None]:
    """What tells one model from another, see `ServerFacts`."""
    return info.get("model_path"), info.get("weight_version")


def model_info(config: PriorConfig) -> dict[str, Any]:
    """What the AR server tells about its model.

    Raises:
        ARServerLost: where it is not there.
        ARServerUntold: where it does not tell.
        ARServerUnfit: where its answer cannot be read.
    """
    # /model_info is the newer name; sglang-router passes on this one alone
    response = _answered(
        config,
        "does not tell its model",
        requests.get,
        "/get_model_info",
        timeout=(config.connect_timeout_s, min(config.read_timeout_s, _HEALTH_S)),
    )
    try:
        info = response.json()
    except ValueError as error:
        raise ARServerUnfit(config, f"does not tell its model: {error}") from None
    if not isinstance(info, dict) or not all(isinstance(i, str | None) for i in model_of(info)):
        raise ARServerUnfit(config, f"does not tell its model: {info!r}")
    return info


def _check_config(config: PriorConfig, path: str, expected: Expected) -> int | None:
    """The model's own limit of tokens."""
    try:
        model, _ = PretrainedConfig.get_config_dict(path)
    except OSError:  # a path of another host
        logger.info(
            "The config of %s, which %s serves, cannot be read from here", path, config.shown_url
        )
        return None
    for name, told, wanted in (
        ("codebook", model["vq_config"]["num_embeddings"], expected.codebook),
        ("image_token_id", model["image_token_id"], expected.image_token_id),
        ("image_start_token_id", model["image_start_token_id"], expected.image_start_token_id),
    ):
        if told != wanted:
            raise ARServerUnfit(config, f"has {name} {told}, this checkpoint has {wanted}")
    return model["text_config"].get("max_position_embeddings")


def _told_context(config: PriorConfig) -> int | None:
    """What the server was started with; sglang-router does not pass it on."""
    timeout = (config.connect_timeout_s, config.read_timeout_s)
    try:
        (model,) = requests.get(config.url + "/v1/models", timeout=timeout).json()["data"]
        told = model["max_model_len"]
    except (requests.RequestException, ValueError, LookupError, TypeError):
        return None
    return told if type(told) is int else None


def _probe(config: PriorConfig, expected: Expected, timeout_s: float) -> tuple[int, ...]:
    """The first ids of a small picture."""
    failed = f"failed a request of {_PROBE_TOKENS} tokens"
    response = _answered(
        config,
        failed,
        requests.post,
        "/generate",
        data=expected.probe,
        headers={"Content-Type": "application/json"},
        timeout=(config.connect_timeout_s, timeout_s),
    )
    wanted = Wanted(
        skipped=0, tokens=_PROBE_TOKENS, source_tokens=(), codebook=expected.codebook
    )
    try:
        return read_answer(response.content, wanted).codes
    except AttemptFailure as error:
        raise ARServerUnfit(config, f"{failed}: {error}") from None


def _answered(
    config: PriorConfig, failed: str, ask: Any, path: str, **options: Any
) -> requests.Response:
    try:
        response = ask(config.url + path, **options)
    except requests.ReadTimeout:
        raise ARServerUntold(config, f"{failed}: no answer") from None
    except requests.RequestException as error:
        raise ARServerLost(config, f"{failed}: {error}") from None
    if response.status_code >= 500:  # a router says 500 for a server that has just died
        raise ARServerUntold(config, f"{failed}: answered {response.status_code}")
    if response.status_code != 200:
        raise ARServerUnfit(config, f"{failed}: answered {response.status_code}")
    return response

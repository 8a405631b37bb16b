# SPDX-License-Identifier: Apache-2.0
"""Hooks on a request's way in: its guidance fields, validated once and put into `Req.extra`."""

import asyncio
import json
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

from sglang.multimodal_gen.configs.glm_image_prior import prior_config
from sglang.multimodal_gen.configs.guidance import REQUEST_FIELDS, guidance_is_on
from sglang.multimodal_gen.guidance_buckets.disagg_hooks import carry_source_images

# the guidance fields of the multipart request that this task serves
_form_fields: ContextVar[dict[str, Any]] = ContextVar("guidance_form_fields", default={})

_CLIENT_CLOSED_REQUEST = 499  # nginx's; no client sees it

# the HTTP request that this task serves
_raw_request: ContextVar[Any] = ContextVar("guidance_raw_request", default=None)


# --- OpenAI API ---------------------------------------------------------------------------------


def json_fields(
    kwargs: dict[str, Any], request: Any, sampling_params_cls: type, api: str, **_kwargs
) -> None:
    """AFTER request_model_kwargs: its result is passed on as sampling params' keywords."""
    kwargs.update(_extra_fields(request))
    if api == "video":
        kwargs.update(_form_fields.get())  # upstream's form drops what it does not know


def _extra_fields(request: Any) -> dict[str, Any]:
    """The guidance fields among those that upstream's request model does not declare."""
    from sglang.multimodal_gen.runtime.entrypoints.openai.utils import request_extra_value

    values = {name: request_extra_value(request, name) for name in REQUEST_FIELDS}
    return {name: value for name, value in values.items() if value is not None}


async def remember_form_fields(original, request: Any, prompt: str, *, task: str, **kwargs) -> str:
    """AROUND maybe_enhance_prompt: the one earlier call of a form's route with the raw request."""
    # a video's job goes on after its request was answered
    _raw_request.set(request if task in ("image", "image_edit") else None)
    if task in ("image_edit", "video"):
        _form_fields.set(form_fields(await request.form()))  # empty where the body is JSON
    return await original(request, prompt, task=task, **kwargs)


def form_fields(form: Any) -> dict[str, Any]:
    """The guidance fields of a form, where every value is text; a list may repeat ``name[]``.

    Those in the JSON of ``extra_body`` and ``extra_params`` count, as they do beside JSON.
    """
    nested = {name: _json_or_text(form.get(name)) for name in ("extra_body", "extra_params")}
    nested = {name: value for name, value in nested.items() if isinstance(value, dict)}
    fields = _extra_fields(SimpleNamespace(model_extra=nested))
    for name in REQUEST_FIELDS:
        values = form.getlist(name) + form.getlist(f"{name}[]")
        if len(values) > 1 or f"{name}[]" in form:
            fields[name] = [_json_or_text(value) for value in values]
        elif values and name in ("guidance_buckets", "guidance_trace"):
            fields[name] = _json_or_text(values[0])
        elif values:
            fields[name] = values[0]
    return fields


def _json_or_text(text: Any) -> Any:
    """A number where the text is one; anything else (a file part too) stays, to be refused."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return text


def add_form_fields(original, request_id: str, **kwargs):
    """AROUND image_api._build_request_sampling_params, which both image routes call."""
    return original(request_id, **_form_fields.get(), **kwargs)


async def abort_when_disconnected(original, scheduler_client: Any, batch: Any, **kwargs):
    """Around process_generation_batch, on a server with continuous batching, and on a head.

    A client that goes away takes its request out of the running batch, or off the AR server.
    Upstream would finish it. Raises HTTPException 499, which nobody reads, for such a request.
    """
    from fastapi import HTTPException

    from sglang.multimodal_gen.runtime.server_args import get_global_server_args

    request = _raw_request.get()
    server_args = get_global_server_args()
    # a head takes a request off the AR server, whatever its denoisers do
    head = server_args.denoiser_urls and prior_config(server_args) is not None
    if request is None or not (getattr(server_args, "max_running_samples", 0) or head):
        return await original(scheduler_client, batch, **kwargs)
    gone = asyncio.ensure_future(_disconnected(request))

    async def forward(batches: Any) -> Any:
        result = await scheduler_client.forward(batches)
        if result.error and gone.done():
            raise asyncio.CancelledError  # any other would be logged as an error of this server
        return result

    work = asyncio.ensure_future(original(SimpleNamespace(forward=forward), batch, **kwargs))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        work.cancel()
        raise
    finally:
        gone.cancel()
    if not work.done():
        from sglang.multimodal_gen.runtime.guidance.abort import AbortReq

        # to every replica: which one took the request is the client's secret
        abort = AbortReq(batch.request_id)
        endpoints = scheduler_client.server_args.scheduler_endpoints
        sent = [scheduler_client._forward_one(endpoint, abort, None) for endpoint in endpoints]
        await asyncio.gather(*sent, return_exceptions=True)  # `work` too knows of a dead replica
    try:
        return await work
    except asyncio.CancelledError:
        if asyncio.current_task().cancelling():
            raise
        raise HTTPException(_CLIENT_CLOSED_REQUEST, "the client closed the request") from None


async def _disconnected(request: Any) -> None:
    """Returns when the client of a request whose body was read is gone.

    `Request.is_disconnected` stays False below an http middleware, which every server has: it
    cancels its own question there before the answer is out.
    """
    while (await request.receive())["type"] != "http.disconnect":
        pass


# --- every way in -------------------------------------------------------------------------------


def build_sampling_params(original, model_path: str, server_args: Any, *args, **kwargs):
    """AROUND SamplingParams.from_user_sampling_params_args.

    Upstream's classes do not know the guidance fields, so they are taken out, and validated when
    the rest is complete. Raises GuidanceError, a ValueError: the API answers 400 with its text.
    """
    from sglang.multimodal_gen.runtime.guidance.requests import request_options

    fields = {name: kwargs.pop(name) for name in REQUEST_FIELDS if name in kwargs}
    sampling_params = original(model_path, server_args, *args, **kwargs)
    if fields or guidance_is_on(server_args):
        sampling_params._guidance = request_options(sampling_params, server_args, fields)
    return sampling_params


def cli_fields(cli_args: dict[str, Any], cls: type, args: Any) -> None:
    """AFTER SamplingParams.get_cli_args: `sglang generate` has flags and config for one request."""
    from sglang.multimodal_gen.runtime.server_args import ServerArgs

    given = vars(args)
    if given.get("config"):
        given = ServerArgs.load_config_file(given["config"]) | {
            name: value for name, value in given.items() if value is not None
        }
    if not given.get("guidance_buckets"):
        return
    for name in REQUEST_FIELDS:
        if given.get(name) is not None:
            # there --guidance-trace names the folder, here it asks for a trace
            cli_args[name] = True if name == "guidance_trace" else given[name]


def keep_options(sampling_params: Any, sampling_params_orig: Any, *_args, **_kwargs) -> None:
    """AFTER _replace_sampling_params_for_prompt, which copies dataclass fields only."""
    sampling_params._guidance = getattr(sampling_params_orig, "_guidance", None)


def attach_to_request(req: Any, server_args: Any, sampling_params: Any, *_args, **_kwargs) -> None:
    """AFTER prepare_request."""
    carry_source_images(req, server_args)
    options = getattr(sampling_params, "_guidance", None)
    if options is not None:
        from sglang.multimodal_gen.runtime.guidance.requests import attach_options

        attach_options(req, options)


def replan_warmup(_result: None, req: Any, *_args, **_kwargs) -> None:
    """AFTER Req.set_as_warmup, on every rank alike."""
    from sglang.multimodal_gen.runtime.guidance.plan import OPTIONS_KEY
    from sglang.multimodal_gen.runtime.guidance.requests import replan_as_warmup

    if OPTIONS_KEY in req.extra:
        replan_as_warmup(req)

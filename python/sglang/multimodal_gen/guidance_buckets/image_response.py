# SPDX-License-Identifier: Apache-2.0
"""The image response with a ``guidance`` object and ``warnings``; without them upstream's."""

from typing import Any

from pydantic import model_serializer

from sglang.multimodal_gen.runtime.entrypoints.openai import protocol


class ImageResponse(protocol.ImageResponse):
    guidance: dict[str, Any] | None = None
    warnings: list[str] | None = None

    @model_serializer(mode="wrap")
    def _leave_out_what_is_not_there(self, serialize):
        data = serialize(self)
        for name in ("guidance", "warnings"):
            if data.get(name) is None:
                data.pop(name, None)
        return data

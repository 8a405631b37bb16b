# SPDX-License-Identifier: Apache-2.0
"""The image response with a ``guidance`` object; without one it is upstream's to the byte."""

from typing import Any

from pydantic import model_serializer

from sglang.multimodal_gen.runtime.entrypoints.openai import protocol


class ImageResponse(protocol.ImageResponse):
    guidance: dict[str, Any] | None = None

    @model_serializer(mode="wrap")
    def _leave_out_no_guidance(self, serialize):
        data = serialize(self)
        if data.get("guidance") is None:
            data.pop("guidance", None)
        return data

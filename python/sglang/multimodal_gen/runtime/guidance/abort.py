# SPDX-License-Identifier: Apache-2.0
"""A client that goes away gives its rows back: the control request that says so."""

from dataclasses import dataclass


@dataclass
class AbortReq:
    """Drop the request of this id, waiting or running. Its answer is an error that says so."""

    request_id: str

# SPDX-License-Identifier: Apache-2.0
"""Which failures of an attempt are worth another one, and when. Plain decisions, no sockets."""

from enum import Enum

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0


class Kind(Enum):
    """How an attempt failed."""

    UNREACHABLE = "refused, reset or closed before an answer"
    CONNECT_TIMEOUT = "no connection in time"
    BUSY = "answered 502 or 503"
    GATEWAY_TIMEOUT = "answered 504"
    TRUNCATED = "closed half-way through an answer"
    READ_TIMEOUT = "connected, and silent for too long"
    WRONG = "an answer that another attempt would only repeat"

    @property
    def is_retried(self) -> bool:
        return self not in (Kind.READ_TIMEOUT, Kind.WRONG)

    @property
    def status(self) -> int:
        """What the client is answered where this was the last attempt."""
        timeouts = (Kind.CONNECT_TIMEOUT, Kind.GATEWAY_TIMEOUT, Kind.READ_TIMEOUT)
        return 504 if self in timeouts else 502


class AttemptFailure(Exception):
    """One attempt that failed, and how."""

    def __init__(self, kind: Kind, cause: str):
        super().__init__(cause)
        self.kind = kind


def kind_of_status(status: int) -> Kind:
    """Of an HTTP status that is not 200."""
    if status == 504:
        return Kind.GATEWAY_TIMEOUT
    return Kind.BUSY if status in (502, 503) else Kind.WRONG


def delay_s(attempt: int, jitter: float) -> float:
    """Seconds before the next attempt: doubling, capped, and half of it random.

    Args:
        attempt: attempts made, 1 or more.
        jitter: random, from 0 to 1; clients that failed together do not return together.
    """
    longest = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** (attempt - 1))
    return longest * (0.5 + 0.5 * jitter)

# SPDX-License-Identifier: Apache-2.0
"""Which samples run next: decided on rank 0 from plain data, no torch.

Samples that may share a forward have equal keys; samples that share with nobody have a key of their
own. Keys take turns by the device time that they have had (start-time fair queueing, Goyal et al.,
SIGCOMM 1996): the key with the least runs next, and a key that appears starts level with the least
of the others. So ten small requests get half of the device beside one large request, as does the
large one, whatever each step costs. Inside a key the oldest samples go first, up to the row budget.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A running sample as the policy sees it.

    Attributes:
        key: samples of equal keys may share a forward.
        rows: of its next step.
        arrival: lower is older.
        most_rows: of a step of its key, where more would only make it longer, or failed; None has
            no limit.
    """

    sample_id: Hashable
    key: Hashable
    rows: int
    arrival: int
    most_rows: int | None = None


def fill_rows(candidates: Sequence[Candidate], max_rows: int) -> list[Candidate]:
    """The oldest samples whose rows fit; the oldest always runs, even alone above the budget."""
    chosen: list[Candidate] = []
    rows = 0
    for candidate in sorted(candidates, key=lambda candidate: candidate.arrival):
        if chosen and rows + candidate.rows > max_rows:
            continue  # a smaller one may still fit
        chosen.append(candidate)
        rows += candidate.rows
    return chosen


@dataclass
class FairTurns:
    """Device time that each key has had, in seconds."""

    served: dict[Hashable, float] = field(default_factory=dict)

    def next_group(self, candidates: Sequence[Candidate], max_rows: int) -> list[Candidate]:
        """The samples of the next step; empty where nothing runs."""
        keys = {candidate.key for candidate in candidates}
        known = [time for key, time in self.served.items() if key in keys]
        level = min(known, default=0.0)
        self.served = {key: self.served.get(key, level) for key in keys}
        if not keys:
            return []

        def oldest(key: Hashable) -> int:
            return min(c.arrival for c in candidates if c.key == key)

        turn = min(keys, key=lambda key: (self.served[key], oldest(key)))
        group = [candidate for candidate in candidates if candidate.key == turn]
        limits = [candidate.most_rows for candidate in group if candidate.most_rows is not None]
        return fill_rows(group, min([max_rows, *limits]))

    def charge(self, key: Hashable, seconds: float) -> None:
        """Account for a step of this key."""
        if key in self.served:
            self.served[key] += seconds

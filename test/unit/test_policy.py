"""Whose turn it is: fairness between keys that cannot share a forward, and the row budget."""

import pytest

from sglang.multimodal_gen.runtime.guidance.policy import Candidate, FairTurns, fill_rows


def candidate(name, key="small", rows=2, arrival=0):
    return Candidate(sample_id=name, key=key, rows=rows, arrival=arrival)


def names(candidates):
    return [candidate.sample_id for candidate in candidates]


@pytest.mark.parametrize(
    ("rows", "max_rows", "chosen"),
    [
        ([2, 2, 2], 6, [0, 1, 2]),
        ([2, 2, 2], 5, [0, 1]),
        ([2, 2, 1], 5, [0, 1, 2]),  # an unguided sample fits where a guided one does not
        ([2, 4, 1], 3, [0, 2]),
        ([8, 1], 4, [0]),  # the oldest always runs
        ([], 4, []),
    ],
)
def test_fill_rows(rows, max_rows, chosen):
    candidates = [candidate(i, rows=count, arrival=i) for i, count in enumerate(rows)]
    assert names(fill_rows(reversed(candidates), max_rows)) == chosen


def test_a_step_that_more_rows_only_lengthen_stays_short():
    samples = [
        Candidate(sample_id=i, key="large", rows=2, arrival=i, most_rows=4) for i in range(5)
    ]
    assert names(FairTurns().next_group(samples, 16)) == [0, 1]
    assert names(FairTurns().next_group(samples, 2)) == [0]


def simulate(turns, samples, seconds_of, total_seconds, max_rows=16):
    """Device seconds that each key got within `total_seconds`."""
    got = dict.fromkeys((sample.key for sample in samples), 0.0)
    while sum(got.values()) < total_seconds:
        key = turns.next_group(samples, max_rows)[0].key
        turns.charge(key, seconds_of[key])
        got[key] += seconds_of[key]
    return got


@pytest.mark.parametrize("large_seconds", [0.25, 2.0])
def test_ten_small_requests_and_a_large_one_hold_back_neither(large_seconds):
    samples = [candidate(i, arrival=i) for i in range(10)] + [candidate("L", "large", arrival=10)]
    got = simulate(FairTurns(), samples, {"small": 0.07, "large": large_seconds}, 40)
    assert abs(got["small"] - got["large"]) <= large_seconds + 0.07


def test_turns_are_fair_where_a_step_is_paid_for_while_the_next_is_launched():
    """On a device: the loop waits for the step before, and charges that wait to its key."""
    samples = [candidate("S", "small"), candidate("L", "large", arrival=1)]
    seconds_of, launch_seconds = {"small": 0.015, "large": 0.25}, 0.005
    turns, got, before = FairTurns(), {"small": 0.0, "large": 0.0}, None
    while sum(got.values()) < 40:
        key = turns.next_group(samples, 16)[0].key
        turns.charge(key, launch_seconds)
        if before is not None:
            turns.charge(before, seconds_of[before] - launch_seconds)
            got[before] += seconds_of[before]
        before = key
    assert abs(got["small"] - got["large"]) <= 0.5


def test_nobody_waits_longer_than_one_step_of_each_other_key():
    samples = [candidate(key, key, arrival=i) for i, key in enumerate("abcde")]
    turns, waits = FairTurns(), dict.fromkeys("abcde", 0)
    for _ in range(200):
        key = turns.next_group(samples, 16)[0].key
        turns.charge(key, 1.0)
        waits = {other: 0 if other == key else waits[other] + 1 for other in waits}
        assert max(waits.values()) <= 4


def test_a_newcomer_starts_level():
    """It neither owes for the time before it came nor is owed for it."""
    turns, old = FairTurns(), candidate("old", "old")
    for _ in range(100):
        turns.next_group([old], 16)
        turns.charge("old", 1.0)
    new = candidate("new", "new", arrival=1)
    got = simulate(turns, [old, new], {"old": 1.0, "new": 1.0}, 10)
    assert got == {"old": 5.0, "new": 5.0}


def test_a_key_that_left_is_forgotten():
    turns = FairTurns()
    turns.next_group([candidate(0, "a"), candidate(1, "b")], 16)
    turns.charge("a", 5.0)
    turns.next_group([candidate(1, "b")], 16)
    assert set(turns.served) == {"b"}
    assert turns.next_group([], 16) == []

"""What bucket graphs decide in plain data: bucket, cost, budget, demand, slots, settings."""

import pytest

from sglang.multimodal_gen.configs.bucket_graphs import BucketGraphConfig, parse_resolution
from sglang.multimodal_gen.configs.guidance_curves import GuidanceError
from sglang.multimodal_gen.runtime.bucket_cuda_graph.buckets import (
    Cost,
    GraphBucket,
    GraphShape,
    cheapest_rows,
    eager_ms,
    row_bucket,
    text_bucket,
)
from sglang.multimodal_gen.runtime.bucket_cuda_graph.budget import GraphBudget
from sglang.multimodal_gen.runtime.bucket_cuda_graph.demand import Demand
from sglang.multimodal_gen.runtime.bucket_cuda_graph.slots import SampleRows, map_rows


def bucket(rows: int, side: int = 32, **changes) -> GraphBucket:
    shape = dict(
        latent_shape=(16, side, side),
        text_length=1,
        masked=False,
        dtype="bfloat16",
        quality="exact",
    )
    return GraphBucket(shape=GraphShape(**(shape | changes)), rows=rows)


# --- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "image_tokens", "wanted"),
    [
        (None, 256, (1, 2, 4, 8, 16)),  # 256x256
        (None, 1024, (1, 2, 4, 8, 16)),  # 512x512
        (None, 4096, (1, 2, 4)),  # 1024x1024
        (None, 16384, (1,)),  # 2048x2048
        (None, 65536, (1,)),
        ((8, 2, 2), 65536, (2, 8)),  # what was named is captured
    ],
)
def test_row_buckets(rows, image_tokens, wanted):
    assert BucketGraphConfig(rows=rows).rows_for(image_tokens) == wanted


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("mode", "sometimes", "--bucket-graphs"),
        ("rows", (0,), "--bucket-graph-rows"),
        ("rows", (2.0,), "--bucket-graph-rows"),
        ("rows", (True,), "--bucket-graph-rows"),
        ("text_lengths", (-1,), "--bucket-graph-text-lengths"),
        ("resolutions", ("512",), "--bucket-graph-resolutions"),
        ("resolutions", ("512x0",), "--bucket-graph-resolutions"),
        ("memory_gb", 0, "--bucket-graph-memory-gb"),
        ("memory_gb", float("nan"), "--bucket-graph-memory-gb"),
    ],
)
def test_wrong_settings_name_their_flag(field, value, flag):
    with pytest.raises(GuidanceError, match=f"^{flag}: got"):
        BucketGraphConfig(**{field: value})


def test_resolution_is_width_by_height():
    assert parse_resolution("1024x512") == (1024, 512)


# --- which bucket -------------------------------------------------------------------------------


def test_labels():
    assert bucket(1).label == "1 row, latent 32x32, text 1, bfloat16, exact"
    assert bucket(2, masked=True, text_length=64).label == (
        "2 rows, latent 32x32, text up to 64, bfloat16, exact"
    )


@pytest.mark.parametrize(("rows", "wanted"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, None)])
def test_row_bucket(rows, wanted):
    assert row_bucket(rows, (8, 1, 4, 2)) == wanted


@pytest.mark.parametrize(
    ("lengths", "has_mask", "unpadded", "can_mask", "wanted"),
    [
        ([1, 1], False, 1, True, (1, False)),  # no quoted text: no padding, no mask
        ([1, 1], False, 1, False, (1, False)),
        ([1, 1], True, 1, True, (64, True)),
        ([1, 9], False, 1, True, (64, True)),
        ([64], False, 1, True, (64, True)),
        ([65, 1], False, 1, True, (256, True)),
        ([257], False, 1, True, None),  # longer than every bucket
        ([1, 9], False, 1, False, None),  # a mask would cost more than a graph saves
        ([333, 333], False, 333, True, (333, False)),
        ([333, 320], False, 333, True, None),
        ([12, 12], False, None, True, (64, True)),  # a family whose texts have no usual length
    ],
)
def test_text_bucket(lengths, has_mask, unpadded, can_mask, wanted):
    got = text_bucket(
        lengths,
        has_mask=has_mask,
        unpadded_length=unpadded,
        text_lengths=(256, 64),
        can_mask=can_mask,
    )
    assert got == wanted


# measured on one H200 (docs/benchmarks.md): replay and eager ms by rows
SMALL = {1: Cost(13, 56), 2: Cost(17, 68), 4: Cost(29, 69), 8: Cost(52, 76), 16: Cost(105, 107)}
LARGE = {1: Cost(111, 115), 2: Cost(222, 225), 4: Cost(434, 437)}


@pytest.mark.parametrize(
    ("rows", "costs", "wanted"),
    [
        (1, SMALL, 1),
        (3, SMALL, 4),  # 29 ms padded, 68 eagerly
        (5, SMALL, 8),
        (9, SMALL, None),  # 105 ms padded, 80 eagerly
        (16, SMALL, 16),
        (17, SMALL, None),
        (3, LARGE, None),  # 434 ms padded, 331 eagerly
        (4, LARGE, 4),
        (1, {2: Cost(17, 68)}, 2),  # eager is taken for 34 ms
        (1, {2: Cost(222, 225)}, None),
        (1, {}, None),
    ],
)
def test_the_cheaper_of_padding_and_eager(rows, costs, wanted):
    assert cheapest_rows(rows, costs) == wanted


@pytest.mark.parametrize(
    ("rows", "token_share", "wanted"),
    [
        (8, 1.0, 8),
        (8, 275 / 320, None),  # 19 text tokens padded to 64: 63 ms, 58 eagerly
        (2, 275 / 320, 2),  # 19 ms against 57
    ],
)
def test_padding_of_texts_counts_against_a_replay(rows, token_share, wanted):
    costs = {2: Cost(19, 66), 8: Cost(63, 67)}
    assert cheapest_rows(rows, costs, token_share) == wanted


@pytest.mark.parametrize(
    ("rows", "wanted"), [(1, 115), (2, 225), (3, 331), (4, 437), (8, 874), (0.5, 57.5)]
)
def test_eager_cost_between_buckets(rows, wanted):
    assert eager_ms(rows, LARGE) == pytest.approx(wanted)


# --- memory -------------------------------------------------------------------------------------


def full_budget() -> GraphBudget:
    """100 bytes: a pool of 40 and six graphs of 10, used in the order 2, 4, 8, 16, 32, 1 rows."""
    budget = GraphBudget(limit=100)
    for rows in (1, 2, 4, 8, 16, 32):
        budget.add(bucket(rows), own=10, pool=40)
    budget.use(bucket(1))
    return budget


@pytest.mark.parametrize(
    ("own", "pool", "dropped"),
    [
        (10, 40, [2]),
        (10, 30, [2]),  # the pool does not shrink
        (20, 40, [2, 4]),
        (10, 70, [2, 4, 8, 16]),
        (60, 40, [2, 4, 8, 16, 32, 1]),
        (61, 40, None),
        (10, 91, None),
        (0, 40, []),
    ],
)
def test_least_recently_used_graphs_go(own, pool, dropped):
    got = full_budget().make_room(own, pool)
    assert (got and [one.rows for one in got]) == (dropped or got)
    assert (got is None) == (dropped is None)


def test_what_a_budget_counts():
    budget = GraphBudget(limit=100)
    budget.add(bucket(4), own=5, pool=50)
    budget.add(bucket(2), own=5, pool=60)
    assert budget.used == 70
    budget.remove(bucket(4))
    assert budget.used == 65  # the pool stays with its other graphs
    budget.remove(bucket(2))
    assert budget.used == 0


# --- what is captured next ----------------------------------------------------------------------


def demand(**steps: int) -> Demand:
    made = Demand()
    for rows, count in steps.items():
        key = None if rows == "none" else bucket(int(rows[1:]))
        for _ in range(count):
            made.add(key, replayed=False)
    return made


@pytest.mark.parametrize(
    ("steps", "captured", "refused", "wanted"),
    [
        ({}, [], [], None),
        ({"r1": 5}, [], [], 1),
        ({"r1": 5, "r2": 7}, [], [], 2),  # what covers most comes first
        ({"r1": 5, "r2": 7}, [2], [], 1),
        ({"r1": 1, "r2": 9}, [2], [], None),  # 90% replay
        ({"r1": 2, "r2": 9}, [2], [], 1),
        ({"r1": 5, "r2": 7}, [], [2], 1),  # what failed is not tried again
        ({"r1": 5}, [], [1], None),
        ({"none": 50, "r1": 1}, [], [], 1),  # what no bucket holds cannot be captured
        ({"none": 50}, [], [], None),
    ],
)
def test_the_next_capture(steps, captured, refused, wanted):
    got = demand(**steps).next_capture(set(map(bucket, captured)), set(map(bucket, refused)))
    assert (got and got.rows) == wanted


def test_captures_go_on_until_90_percent_replay():
    seen = demand(r1=60, r2=25, r4=10, r8=5)
    captured = []
    while (found := seen.next_capture(set(captured), set())) is not None:
        captured.append(found)
    assert [one.rows for one in captured] == [1, 2, 4]


def test_old_demand_fades():
    seen = demand(r1=9_000)
    for _ in range(20_000):
        seen.add(bucket(2), replayed=True)
    assert seen.steps[bucket(1)] < 0.1 * seen.steps[bucket(2)]
    assert seen.replayed_share == pytest.approx(20 / 29)


# --- slots --------------------------------------------------------------------------------------

GUIDED, COND, UNCOND = ("uncond", "cond"), ("cond",), ("uncond",)


def test_rows_of_guided_and_unguided_samples():
    samples = [SampleRows(7, 1, GUIDED), SampleRows(8, 1, COND), SampleRows(9, 2, UNCOND)]
    made = map_rows(samples, [None] * 8, 8)
    assert made.loads == {
        (7, "uncond", 0): 0,
        (7, "cond", 0): 1,
        (8, "cond", 0): 2,
        (9, "uncond", 0): 3,
        (9, "uncond", 1): 4,
    }
    assert made.image_of_row == [0, 0, 1, 2, 3, 0, 0, 0]
    assert made.uncond_row[:4] == [0, 2, 3, 4]
    assert made.cond_row[:4] == [1, 2, 3, 4]


def test_rows_stay_where_they_are():
    samples = [SampleRows(7, 1, GUIDED), SampleRows(8, 1, GUIDED)]
    held = [None] * 4
    for key, slot in map_rows(samples, held, 4).loads.items():
        held[slot] = key
    made = map_rows([samples[1], SampleRows(9, 1, COND)], held, 4)
    assert made.loads == {(9, "cond", 0): 0}
    assert (made.uncond_row[0], made.cond_row[0]) == (2, 3)  # sample 8 is image 0 now
    assert made.image_of_row == [1, 0, 0, 0]
    assert made.cond_row[1] == made.uncond_row[1] == 0


def test_rows_beyond_a_smaller_bucket_move():
    held = [None, None, (7, "uncond", 0), (7, "cond", 0)]
    made = map_rows([SampleRows(7, 1, GUIDED)], held, 2)
    assert made.loads == {(7, "uncond", 0): 0, (7, "cond", 0): 1}


def test_a_sample_that_turns_unguided_keeps_its_row():
    held = [(7, "uncond", 0), (7, "cond", 0)]
    made = map_rows([SampleRows(7, 1, COND)], held, 2)
    assert not made.loads
    assert made.cond_row[0] == made.uncond_row[0] == 1

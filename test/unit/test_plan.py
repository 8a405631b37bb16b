"""Bucket plans as plain data."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from sglang.multimodal_gen.configs.guidance import GuidanceOptions
from sglang.multimodal_gen.runtime.guidance.plan import BucketPlan, PlannedSample

SCHEDULE = GuidanceOptions(
    curve=[2, 1, 0, 3], buckets=4, bucket_mode="constant", scale=1.5
).schedule(4)
PLAN = BucketPlan.for_request("request", 2, SCHEDULE)


def test_steps_and_rows():
    steps = [PLAN.at(step)[0] for step in range(PLAN.num_steps)]
    assert [step.scale for step in steps] == [2, 1, 0, 3]
    assert [step.bucket for step in steps] == [0, 1, 2, 3]
    assert [step.rows for step in steps] == [4, 2, 2, 4]
    assert [step.branches for step in steps] == [
        *(("uncond", "cond"), ("cond",), ("uncond",), ("uncond", "cond"))
    ]


def test_samples_at_different_steps():
    late = PlannedSample(
        sample_id="late", images=1, first_step=7, bucket_ids=(3, 3), scales=(1.0, 1.0)
    )
    plan = BucketPlan(samples=(*PLAN.samples, late))
    assert plan.num_steps == 2
    assert [(step.sample_id, step.step, step.rows) for step in plan.at(1)] == [
        ("request", 1, 2),
        ("late", 8, 1),
    ]


def test_survives_json():
    assert BucketPlan.from_dict(json.loads(json.dumps(PLAN.to_dict()))) == PLAN


@pytest.mark.parametrize(
    "change",
    [
        {"sample_id": "other"},
        {"images": 1},
        {"first_step": 1},
        {"bucket_ids": (0, 1, 2, 2)},
        {"scales": (2.0, 1.0, 0.0, 3.0000000000000004)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_digest_tells_plans_apart(change):
    other = BucketPlan(samples=(replace(PLAN.samples[0], **change),))
    assert other.digest() != PLAN.digest()
    assert BucketPlan.from_dict(PLAN.to_dict()).digest() == PLAN.digest()


def test_digest_is_the_same_in_every_process():
    code = (
        "import json, sys; from sglang.multimodal_gen.runtime.guidance.plan import BucketPlan;"
        "print(BucketPlan.from_dict(json.loads(sys.argv[1])).digest().hex())"
    )
    got = subprocess.run(
        [sys.executable, "-c", code, json.dumps(PLAN.to_dict())],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "1"},
    )
    assert got.stdout.split()[-1] == PLAN.digest().hex()

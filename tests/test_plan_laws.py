"""Plans from files: numbers in range, parts that agree with each other and with the model."""

import json
from collections.abc import Callable
from typing import Any

import pytest

import autopar
from autopar.errors import PlanError
from autopar.formulate.agreement import check_blocks
from autopar.plan import Plan
from autopar.workload import open_plan


@pytest.fixture(scope="module")
def written() -> bytes:
    """Return a plan of two stages as it is written."""
    return autopar.predict("zoo:mlp-xs", autopar.Degrees(dp=2, pp=2, global_batch=8), cache_dir=None).plan.to_json()


Edit = Callable[[dict[str, Any]], object]


def edited(written: bytes, edit: Edit) -> bytes:
    content = json.loads(written)
    edit(content)
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda plan: plan["job"].update(gpus=0), "job.gpus is 0, out of its range from 1 to 1048576"),
        (lambda plan: plan["job"].update(gpus=10**12), "job.gpus is 1000000000000"),
        (lambda plan: plan.update(num_microbatches=10**15), "num_microbatches is 1000000000000000"),
        (lambda plan: plan.update(num_microbatches=3), "a batch of 8 cannot be 3 equal microbatches"),
        (lambda plan: plan["job"].update(memory_limit=-1.0), "job.memory_limit is -1"),
        (lambda plan: plan.update(objective=-1.0), "objective is -1"),
        (lambda plan: plan["simulated"].update(step_seconds=-2.0), "simulated.step_seconds is -2"),
        (lambda plan: plan["simulated"].update(stages=[]), "simulated.stages has 0 entries for stages on 2 ranges"),
        (lambda plan: plan["simulated"]["stages"].pop(), "simulated.stages has 1 entries for stages on 2 ranges"),
        (lambda plan: plan["mesh"][0].update(size=0), "mesh has an axis of 0 devices"),
        (lambda plan: plan["mesh"][0].update(name=""), "mesh has axes named ''"),
        (lambda plan: plan["mesh"][0].update(stride=7), "the strides of mesh"),
        (lambda plan: plan.update(stages=[]), "it has no stages"),
        (lambda plan: plan["stages"][0].update(blocks=[0, 10**12]), "stage 0 has blocks from 0 to 1000000000000"),
        (lambda plan: plan["stages"][0].update(devices=[2, 2]), "stage 0 has devices from 2 to 2"),
        (lambda plan: plan["stages"].reverse(), "its stages do not have the blocks one after the other"),
        (lambda plan: plan["stages"].pop(), "its stages have 4 blocks, and 8 are placed"),
        (
            lambda plan: plan["stages"][0].update(recompute="full*9999999"),
            "stage 0: recompute 'full.9999999' is for more",
        ),
        (lambda plan: plan["stages"][0].update(recompute="full*" + "9" * 5000), "is no recompute of a stage"),
        (
            lambda plan: plan["blocks"][0]["ops"][0]["inputs"].__setitem__(0, "RR"),
            "'RR' are 2 placements on 1 mesh axes",
        ),
        (lambda plan: plan["blocks"][0]["ops"][0]["inputs"].__setitem__(0, "Q"), "'Q' is not a placement"),
    ],
)
def test_a_plan_that_contradicts_itself_is_none(written: bytes, edit: Edit, message: str) -> None:
    with pytest.raises(PlanError, match=f"not a plan: .*{message}"):
        Plan.from_json(edited(written, edit))


@pytest.mark.parametrize(
    "data",
    [b"\xff", b"[" * 20_000, b'{"a": NaN}', b"{}", b"[]", b""],
    ids=["bytes", "deep", "nan", "empty", "list", "nothing"],
)
def test_what_is_no_json_is_no_plan(data: bytes) -> None:
    with pytest.raises(PlanError, match="not a plan"):
        Plan.from_json(data)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda plan: plan["blocks"][0]["ops"].pop(), "only some ops, or ops in another order"),
        (lambda plan: plan["blocks"][0]["ops"].reverse(), "only some ops, or ops in another order"),
        (
            lambda plan: plan["blocks"][0]["ops"][0].update(op="other"),
            "places op 'other', which the model does not have",
        ),
        (lambda plan: plan["blocks"][0]["ops"][0]["inputs"].append("R"), "places 3 inputs of op"),
        (lambda plan: plan["blocks"][0].update(kind=99), "the plan has a block kind 99"),
        (
            lambda plan: plan["blocks"][0]["states"][0].update(value="other"),
            "places 'other', which the model does not have",
        ),
        (lambda plan: plan["blocks"][0]["states"][0].update(placement="S(9)"), r"cannot be placed as S\(9\) on mesh"),
    ],
)
def test_a_plan_that_contradicts_its_model_is_refused_before_anyone_works_on_it(
    written: bytes, edit: Edit, message: str
) -> None:
    plan = Plan.from_json(edited(written, edit))

    with pytest.raises(PlanError, match=message):
        open_plan(plan)


def test_plans_that_are_right_are_taken(written: bytes) -> None:
    """As they were written, block by block."""
    plan = Plan.from_json(written)

    check_blocks(plan, open_plan(plan).folded(plan.microbatch))
    assert plan.to_json() == written

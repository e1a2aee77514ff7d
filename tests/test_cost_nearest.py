"""The stack of a user who names none."""

from dataclasses import replace

import pytest

from autopar import predict
from autopar.cluster.presets import PRESETS
from autopar.cost import IDEAL, NEAREST, Stack, bundled_stacks, resolve_stack
from autopar.cost.nearest import WIDER, is_for, nearest_stack, step_error
from autopar.degrees import Degrees
from autopar.request import JobRequest


@pytest.mark.parametrize("name", PRESETS)
def test_the_default_is_a_fitted_stack_of_the_device_where_there_is_one(name: str) -> None:
    cluster = PRESETS[name]

    found = nearest_stack(cluster)

    own = [stack for stack in bundled_stacks().values() if stack.fit is not None and is_for(stack, cluster)]
    if own:
        assert found in own
        assert found.attention == "fused" or all(stack.attention == "unfused" for stack in own)
    else:
        assert not is_for(found, cluster)


def test_names_and_records() -> None:
    cluster, mine = PRESETS["h100"], Stack("mine")

    assert resolve_stack(NEAREST, cluster) == nearest_stack(cluster)
    assert resolve_stack("ideal", cluster) is IDEAL
    assert resolve_stack(mine, cluster) is mine
    assert JobRequest("zoo:mlp-xs", gpus=8).load_stack() == nearest_stack(cluster)
    assert JobRequest("zoo:mlp-xs", gpus=8, stack="ideal").load_stack() is IDEAL


def test_the_error_of_a_fit_is_wider_on_another_device() -> None:
    stack = nearest_stack(PRESETS["h100"])
    assert stack.fit is not None

    here = step_error(stack, PRESETS["h100"])
    there = step_error(stack, PRESETS["l4"])

    assert here is not None
    assert here >= stack.fit.error
    assert there == WIDER * here
    assert step_error(IDEAL, PRESETS["h100"]) is None


def test_an_unknown_device_takes_the_stack_of_the_nearest_one_and_says_so() -> None:
    h100 = PRESETS["h100"]
    device = replace(h100.device, name="H900", memory_bandwidth=1.05 * h100.device.memory_bandwidth)
    cluster = replace(h100, name="new", device=device)

    found = predict("zoo:mlp-xs", Degrees(dp=4, microbatch=2, global_batch=32), cluster=cluster)

    assert found.plan.job.stack["name"] == nearest_stack(h100).name
    assert found.plan.simulated is not None
    notes = [remark.text for remark in found.plan.simulated.remarks if remark.kind == "calibration"]
    assert any("not calibrated on H900" in note and nearest_stack(h100).name in note for note in notes)

"""The text of what differs between two plans."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.cli import main
from autopar.errors import PlanError
from autopar.plan import Plan, StagePlan, ValuePlacement
from autopar.report import format_difference
from tests.plans import two_stage_plan, two_variant_plan

GOLDEN = Path(__file__).parent / "golden" / "difference.txt"


def _other() -> Plan:
    """Return the plan with one stage, another schedule, another placement of a parameter, and another verdict."""
    plan = two_stage_plan()
    block, state = plan.blocks[0], plan.blocks[0].states[0]
    moved = replace(block, states=(ValuePlacement(state.value, "RS(0)"), *block.states[1:]))
    assert plan.simulated is not None
    return replace(
        plan,
        summary="dp=2 × tp=2 × pp=1, 8 microbatches of 8, no recompute",
        stages=(StagePlan((0, 4), (0, 4), "none"),),
        num_microbatches=8,
        blocks=(moved, *plan.blocks[1:]),
        simulated=replace(
            plan.simulated, step_seconds=2 * plan.simulated.step_seconds, stages=plan.simulated.stages[:1]
        ),
    )


def test_the_difference_is_the_golden_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compared whole: a change of the text is a change of the golden file."""
    two_stage_plan().save(tmp_path / "a.json")
    _other().save(tmp_path / "b.json")

    code = main(["diff", str(tmp_path / "a.json"), str(tmp_path / "b.json")])

    assert (code, capsys.readouterr().out) == (0, GOLDEN.read_text())


def test_equal_plans_differ_in_nothing() -> None:
    text = format_difference(two_stage_plan(), two_stage_plan())

    assert "the same mesh, stages and schedule" in text
    assert "all the same" in text


def test_variants_are_compared_stage_by_stage() -> None:
    """Those whose meshes have the same axes; here they differ in one parameter."""
    plan = two_variant_plan()
    states = (ValuePlacement("h.0.up.weight", "S(1)"), ValuePlacement("h.0.down.weight", "R"))
    moved = replace(plan.variants[0], blocks=(replace(plan.variants[0].blocks[0], states=states),))

    text = format_difference(plan, replace(plan, variants=(moved,)))
    other = format_difference(two_stage_plan(), plan)

    assert "Block 2, placements that differ: 1" in text
    assert "parameter  h.0.up.weight  S(0)   S(1)" in text
    assert "mesh of a stage  dp=2×tp=2  dp=2×tp=2, tp=2" in other
    assert "not compared of some stages: the meshes have different axes" in other


@pytest.mark.parametrize("other", [{"name": "other"}, {"num_parameters": 7}, {"tokens": 7}])
def test_plans_of_different_models_are_not_compared(other: dict[str, Any]) -> None:
    """A model of another name, another number of parameters or another length of a sequence is another model."""
    plan = two_stage_plan()

    with pytest.raises(PlanError, match="one plan is for tiny"):
        format_difference(plan, replace(plan, model=replace(plan.model, **other)))


def test_plans_of_different_files_say_so() -> None:
    """An export of a model and the zoo's graph of it may name their values differently."""
    plan = two_stage_plan()

    text = format_difference(plan, replace(plan, model=replace(plan.model, sha256="another")))

    assert "made for different files of a model of this name and size" in text
    assert "made for different files" not in format_difference(plan, plan)

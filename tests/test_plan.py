"""Plans as files: what is written, what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.errors import PlanError
from autopar.plan import Plan, Variant, check_variants
from tests.plans import two_stage_plan, two_variant_plan


def test_the_folder_of_a_plan_is_as_good_as_its_file(tmp_path: Path) -> None:
    """As `-o DIR` leaves it; of a folder without one, the file that is missing is named."""
    plan = two_stage_plan()
    plan.save(tmp_path / "plan.json")

    assert Plan.load(tmp_path) == Plan.load(tmp_path / "plan.json")
    (tmp_path / "plan.json").unlink()
    with pytest.raises(PlanError, match=r"cannot read plan '.*plan\.json': No such file"):
        Plan.load(tmp_path)


def test_a_plan_without_variants_is_written_as_ever() -> None:
    """Readers of the first version understand it."""
    written = json.loads(two_stage_plan().to_json())

    assert written["version"] == 1
    assert "variants" not in written
    assert all(set(stage) == {"blocks", "devices", "recompute"} for stage in written["stages"])
    assert list(written) == [
        *("model", "job", "summary", "mesh", "stages", "schedule", "num_microbatches", "blocks", "objective"),
        *("simulated", "search", "alternatives", "version"),
    ]


def test_a_plan_with_variants_survives_its_file() -> None:
    """It is of a version that readers who would not see its variants refuse."""
    plan = two_variant_plan()

    assert Plan.from_json(plan.to_json()) == plan
    assert plan.version == 2
    assert replace(plan, variants=(), stages=two_stage_plan().stages).version == 1
    assert replace(two_stage_plan(), alternatives=(plan,)).version == 2


def test_stages_know_their_variants() -> None:
    """Number 0 is the plan's own mesh and blocks."""
    plan = two_variant_plan()

    assert [str(plan.variant_of(stage).device_mesh) for stage in plan.stages] == ["dp=2×tp=2", "tp=2"]
    assert plan.variant_of(plan.stages[0]) == plan.all_variants[0]
    assert [plan.block_plan(block).kind for block in range(4)] == [0, 1, 1, 2]
    assert plan.block_plan(2) is plan.variants[0].blocks[0]
    assert plan.numbers_of(1) == (1,)


def test_the_stages_of_a_variant_are_a_plan() -> None:
    """Those stages, with the blocks they have."""
    alone = two_variant_plan().of_variant(1)

    assert [(stage.blocks, stage.variant) for stage in alone.stages] == [((2, 4), 0)]
    assert [(block.kind, block.instances) for block in alone.blocks] == [(1, (2,)), (2, (3,))]
    assert str(alone.device_mesh) == "tp=2"
    assert alone.version == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data["stages"][1].update(variant=2), "stage 1 has variant 2, the plan has 2"),
        (
            lambda data: data["stages"][1].update(devices=[4, 8]),
            "stage 1 has 4 devices, the mesh tp=2 of its variant 1",
        ),
        (lambda data: data["variants"][0]["blocks"].pop(), "stage 1 has blocks of kind 2"),
        (lambda data: data["variants"].append(data["variants"][0]), "no stage has variant 2"),
        (lambda data: data.update(version=5), "plan of version 5, this autopar reads 1 to 4"),
    ],
)
def test_what_does_not_fit_together_is_refused(change: object, message: str) -> None:
    """Each stage has a mesh of its size with all its blocks on it."""
    data = json.loads(two_variant_plan().to_json())
    assert callable(change)
    change(data)

    with pytest.raises(PlanError, match=message):
        Plan.from_json(json.dumps(data).encode())


def test_stages_that_take_turns_have_one_variant() -> None:
    """Their devices are one mesh, and hand over to each other without sending anything."""
    plan = two_stage_plan()
    first, second = plan.stages
    stages = (first, replace(second, devices=first.devices, variant=1))

    with pytest.raises(PlanError, match=r"stage 0 has other placements than a stage it takes turns with on .*\(0, 4\)"):
        check_variants(replace(plan, stages=stages, variants=(Variant(plan.mesh, plan.blocks),)))

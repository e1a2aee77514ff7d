"""Plans read back as tactics: applied again, they make the same plan."""

from pathlib import Path

import pytest
import yaml

from autopar.configuration import Configuration
from autopar.errors import TacticError
from autopar.formulate.manual_recipes import batch_dims
from autopar.plan import Plan
from autopar.sharding import Mesh
from autopar.tactics import DataParallel, Megatron, Place, Tactic, ZeRO, format_schedule, schedule_from
from autopar.tactics.draft import Draft
from autopar.tactics.reading import tactics_of
from tests.executions import COSTS, Execution, model_graph, model_rules, solved_plan
from tests.shares import one_in
from tests.tactic_models import chain, draft

FAMILIES = ("gpt2", "llama3-8b", "bert-base", "vit-b16", "mixtral-8x7b", "mlp-xs", "resnet50")


def _read(name: str, plan: Plan, cache_dir: Path) -> tuple[tuple[Tactic, ...], Plan]:
    """Return a plan as a schedule that has been a file, and what that makes."""
    execution = Execution.of(name, plan.microbatch, plan.num_microbatches)
    rules = model_rules(name, cache_dir)
    dims = batch_dims(execution.folded.graph.values, model_graph(name, 10).values)
    schedule = schedule_from(yaml.safe_load(format_schedule(tactics_of(plan, execution.folded, rules, dims))))
    found = Draft(
        execution.folded, rules, plan.device_mesh, COSTS,
        model=plan.model, job=plan.job, batch=dims, num_microbatches=plan.num_microbatches,
    )  # fmt: skip
    for tactic in schedule:
        found.decide(tactic)
    return schedule, found.plan()


@pytest.mark.parametrize("name", one_in(4, FAMILIES))
@pytest.mark.parametrize("stages", [1, 2])
def test_solved_plans_come_back(name: str, stages: int, cache_dir: Path) -> None:
    execution, rules = Execution.of(name, 4, 2), model_rules(name, cache_dir)
    configuration = Configuration(stages, Mesh.of(b=2, m=2), 2, "1f1b")
    plan = solved_plan(execution.folded, rules, configuration, 4)

    _, again = _read(name, plan, cache_dir)

    assert again.blocks == plan.blocks
    assert (again.stages, again.schedule, again.num_microbatches) == (plan.stages, plan.schedule, plan.num_microbatches)


def test_what_people_would_name_is_named(cache_dir: Path) -> None:
    execution, rules = Execution.of("gpt2", 4, 2), model_rules("gpt2", cache_dir)
    configuration = Configuration(1, Mesh.of(b=2, m=2), 2, "1f1b")
    solved = solved_plan(execution.folded, rules, configuration, 4)
    dims = batch_dims(execution.folded.graph.values, model_graph("gpt2", 10).values)
    found = Draft(
        execution.folded, rules, Mesh.of(b=2, m=2), COSTS,
        model=solved.model, job=solved.job, batch=dims, num_microbatches=2,
    )  # fmt: skip
    for tactic in (DataParallel("b"), Megatron("m"), ZeRO(3, "b")):
        found.decide(tactic)

    schedule, again = _read("gpt2", found.plan(), cache_dir)

    assert schedule[:2] == (DataParallel("b"), Megatron("m"))
    assert isinstance(schedule[2], ZeRO)
    assert execution.check(again) <= 1e-9


@pytest.mark.parametrize(
    ("tactic", "message"),
    [
        (Place({"z": "R,R -> R"}), "there is no op 'z' in a representative block"),
        (Place({"y": "R,R -> R"}), "'y' cannot run as 'R,R -> R' on b=2×m=2"),
        (Place({"y": "R,R -> R | S(1),R -> S(1)"}), "'y' cannot run as"),
        (Place({}, {"z": "RR"}), "there is no value 'z'"),
        (Place({}, {"w1": "R"}), "'w1' at 'R' on b=2×m=2"),
        (Place({}, {"w1": "nothing"}), "'w1' at 'nothing'"),
        (Place({}, {}, {"z@0/forward": "RR"}), "there is no value 'z@0/forward'"),
    ],
)
def test_what_cannot_be_placed(tactic: Place, message: str, cache_dir: Path) -> None:
    found = draft(chain(), Mesh.of(b=2, m=2), 256, cache_dir)
    before = found.plan()

    with pytest.raises(TacticError) as caught:
        found.decide(tactic)

    assert message in str(caught.value)
    assert found.plan() == before

"""The law for every kind of parallelism that has a name: three steps train like the unpartitioned model."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from autopar.configuration import Configuration
from autopar.discover import discover
from autopar.plan import Plan
from autopar.recompute import Recompute
from autopar.sharding import Mesh
from tests.executions import TINY, Execution, interleave, model_graph, model_rules, random_plan, solved_plan
from tests.named_plans import Data, Expert, Free, Megatron, Task, Vocabulary, check_kind, named_plan
from tests.shares import some

SAMPLES, STEPS = 4, 3
ONE, TWO = Mesh.of(inner=2), Mesh.of(outer=2, inner=2)
DENSE = ("gpt2", "llama3-8b", "bert-base", "vit-b16")
LANGUAGE = ("gpt2", "llama3-8b", "mixtral-8x7b")
MOE = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of plan.

    Attributes:
        tasks: What each mesh axis is for.
        configuration: Stages, mesh, microbatches and schedule.
        models: The models that have what the kind divides.
        often: Those that are tried on every change; the others are slow.
        groups: Groups of devices the stages take turns on; 0 if each stage has its own.
        recompute: What stages recompute.
    """

    tasks: tuple[Task, ...]
    configuration: Configuration
    models: tuple[str, ...]
    often: tuple[str, ...]
    groups: int = 0
    recompute: Recompute = Recompute.NONE


def _flat(mesh: Mesh, count: int = 2) -> Configuration:
    return Configuration(1, mesh, count, "1f1b")


FULL = Recompute.FULL
IN_TURN = ("zb-v", "1f1b-a2a", "dualpipe-v")
KINDS: Mapping[str, Kind] = {
    "data": Kind((Data(),), _flat(ONE), tuple(TINY), ("mlp-xs", "gpt2")),
    "tensor": Kind((Megatron(),), _flat(ONE), DENSE, ("gpt2", "llama3-8b")),
    "sequence": Kind((Megatron(sequence=True),), _flat(ONE), DENSE[:3], ("gpt2", "llama3-8b")),
    "vocabulary": Kind((Vocabulary(),), _flat(ONE), LANGUAGE, ("gpt2", "llama3-8b")),
    "expert": Kind((Expert(),), _flat(Mesh.of(inner=4)), MOE, MOE),
    "zero-1": Kind((Data(1),), _flat(ONE), tuple(TINY), ("llama3-8b", "mlp-xs")),
    "zero-2": Kind((Data(2),), _flat(ONE), tuple(TINY), ("gpt2", "mlp-xs")),
    "zero-3": Kind((Data(3),), _flat(ONE), tuple(TINY), ("gpt2", "llama3-8b")),
    "gpipe": Kind((Free(),), Configuration(3, ONE, 3, "gpipe"), tuple(TINY), ("llama3-8b", "mlp-xs")),
    "1f1b": Kind((Free(),), Configuration(3, ONE, 3, "1f1b"), tuple(TINY), ("gpt2", "mlp-xs")),
    "interleaved": Kind((Free(),), Configuration(4, ONE, 4, "1f1b"), tuple(TINY), ("llama3-8b", "mlp-xs"), groups=2),
    "zb-h1": Kind((Free(),), Configuration(3, ONE, 3, "zb-h1"), tuple(TINY), ("llama3-8b", "mlp-xs"), recompute=FULL),
    "zb-h2": Kind((Free(),), Configuration(2, ONE, 4, "zb-h2"), tuple(TINY), ("gpt2", "mlp-xs")),
    "zb-v": Kind((Free(),), Configuration(4, ONE, 3, "zb-v"), tuple(TINY), ("llama3-8b", "mlp-xs"), groups=2),
    "1f1b-a2a": Kind((Expert(),), Configuration(4, TWO, 4, "1f1b-a2a"), MOE, (), groups=2),
    "dualpipe-v": Kind((Free(),), Configuration(4, ONE, 4, "dualpipe-v"), tuple(TINY), ("mlp-xs",), groups=2),
    "recompute": Kind((Free(),), Configuration(2, ONE, 2, "1f1b"), tuple(TINY), ("gpt2", "mlp-xs"), recompute=FULL),
    "selective recompute": Kind(
        (Free(),), Configuration(2, TWO, 2, "1f1b"), tuple(TINY), ("gpt2", "mlp-xs"), recompute=Recompute.SELECTIVE
    ),
    "data×tensor": Kind((Data(1), Megatron()), Configuration(2, TWO, 2, "1f1b"), DENSE, ("llama3-8b",)),
    "zero-3×sequence": Kind(
        (Data(3), Megatron(sequence=True)), Configuration(2, TWO, 2, "gpipe"), DENSE[:3], ("gpt2",), recompute=FULL
    ),
    "zero-2×tensor zb-h1": Kind((Data(2), Megatron()), Configuration(2, TWO, 2, "zb-h1"), DENSE, ("gpt2",)),
    "zero-2×expert": Kind((Data(2), Expert()), Configuration(2, TWO, 2, "1f1b"), MOE, MOE),
    "data×vocabulary": Kind((Data(), Vocabulary()), Configuration(2, TWO, 2, "1f1b"), LANGUAGE, ()),
    "data×tensor interleaved": Kind(
        (Data(), Megatron()), Configuration(4, TWO, 2, "1f1b"), DENSE, (), groups=2, recompute=FULL
    ),
}  # fmt: skip


@cache
def _execution(model: str, count: int) -> Execution:
    return Execution.of(model, SAMPLES, count, steps=STEPS)


def _plan(name: str, model: str, cache_dir: Path) -> tuple[Execution, Plan]:
    """Return a plan of a kind, and the model to execute it on."""
    kind = KINDS[name]
    execution = _execution(model, kind.configuration.num_microbatches)
    rules = model_rules(model, cache_dir)
    plan = named_plan(model, execution.folded, rules, kind.configuration, kind.tasks, SAMPLES, recompute=kind.recompute)
    if not kind.groups:
        return execution, plan
    schedule = kind.configuration.schedule
    return execution, interleave(plan, kind.groups, schedule if schedule in IN_TURN else "interleaved")


CASES = [
    pytest.param(name, model, marks=() if model in kind.often else pytest.mark.slow, id=f"{name}-{model}")
    for name, kind in KINDS.items()
    for model in kind.models
]


@pytest.mark.parametrize(("name", "model"), CASES)
def test_plans_of_a_kind_train_like_the_model(name: str, model: str, cache_dir: Path) -> None:
    """The plan is of its kind, and three steps of it have the loss, gradients and states of the model."""
    execution, plan = _plan(name, model, cache_dir)

    check_kind(plan, model, execution.folded, KINDS[name].tasks, SAMPLES)
    assert {stage.recompute for stage in plan.stages} == {str(KINDS[name].recompute)}
    execution.check(plan)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("data", Data(1)),
        ("zero-1", Data(2)),
        ("zero-2", Data(3)),
        ("tensor", Megatron(sequence=True)),
        ("data", Vocabulary()),
    ],
)
def test_a_plan_of_one_kind_is_none_of_another(name: str, other: Task, cache_dir: Path) -> None:
    """So that the check above means something."""
    execution, plan = _plan(name, "gpt2", cache_dir)

    with pytest.raises(AssertionError, match=f"{other}: .* is "):
        check_kind(plan, "gpt2", execution.folded, (other,), SAMPLES)


HYBRIDS = (
    Configuration(2, Mesh.of(outer=2, inner=2), 4, "1f1b"),
    Configuration(1, Mesh.of(outer=2, inner=4), 2, "1f1b"),
    Configuration(2, Mesh.of(inner=4), 2, "gpipe"),
    Configuration(4, Mesh.of(inner=2), 4, "1f1b"),
    Configuration(1, Mesh.of(a=2, b=2, c=2), 1, "1f1b"),
)
"""Ways to use 8 devices."""


@pytest.mark.parametrize(
    ("model", "configuration"),
    [
        pytest.param(model, configuration, marks=() if model in often else pytest.mark.slow, id=f"{model}-{number}")
        for number, (configuration, often) in enumerate(
            zip(HYBRIDS, (("llama3-8b",), ("mlp-xs",), ("gpt2",), ("mlp-xs",), ()), strict=True)
        )
        for model in TINY
    ],
)
def test_hybrids_on_8_devices_train_like_the_model(model: str, configuration: Configuration, cache_dir: Path) -> None:
    """The plan a solver takes for the best, and a random one."""
    execution, rules = _execution(model, configuration.num_microbatches), model_rules(model, cache_dir)

    execution.check(random_plan(execution.folded, rules, configuration, SAMPLES, seed=8))
    if len(configuration.mesh.axes) < 3:
        execution.check(solved_plan(execution.folded, rules, configuration, SAMPLES))


@pytest.mark.parametrize("model", some(TINY, lambda name: name in ("llama3-8b", "mlp-xs")))
def test_float32_keeps_the_law_up_to_its_rounding(model: str, cache_dir: Path) -> None:
    """Rules do not depend on the precision, nor do plans."""
    configuration = HYBRIDS[0]
    execution = Execution.of(model, SAMPLES, configuration.num_microbatches, steps=STEPS, double=False)
    rules = discover(model_graph(model, 10, double=False), cache_dir=cache_dir)

    execution.check(random_plan(execution.folded, rules, configuration, SAMPLES, seed=32))

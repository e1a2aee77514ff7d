"""The central law: whatever the plan, the program computes what the unpartitioned model computes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autopar.configuration import Configuration
from autopar.errors import ModelError, ProgramError
from autopar.execute import run_graph
from autopar.ir.graph import Role
from autopar.program.records import Collective, Compute, Program, Segment, SegmentPhase
from autopar.runtime import run_step
from autopar.schedule import SCHEDULES
from autopar.sharding import Mesh, Replicate
from autopar.simulate import simulate
from tests.executions import (
    COSTS,
    EXECUTOR,
    TINY,
    Execution,
    check_close,
    model_graph,
    model_rules,
    random_plan,
    solved_plan,
)
from tests.shares import some

SPACE = (
    Configuration(1, Mesh.of(outer=2, inner=2), 2, "1f1b"),
    Configuration(2, Mesh.of(inner=4), 1, "gpipe"),
    Configuration(3, Mesh.of(inner=2), 4, "1f1b"),
    Configuration(1, Mesh.of(outer=2, inner=4), 1, "1f1b"),
    Configuration(2, Mesh.of(outer=2, inner=2), 3, "gpipe"),
    Configuration(3, Mesh.of(inner=2), 4, "zb-h1"),
    Configuration(2, Mesh.of(outer=2, inner=2), 3, "zb-h2"),
    Configuration(4, Mesh.of(inner=2), 3, "zb-v"),
    Configuration(4, Mesh.of(inner=2), 4, "dualpipe-v"),
    Configuration(2, Mesh.of(outer=2), 2, "1f1b-a2a"),
)
"""1 to 4 stages, 2 to 12 devices, one axis and two, 1 to 4 microbatches."""


@pytest.mark.parametrize("name", some(TINY, lambda name: name not in ("unet-sd1", "deepseek-moe-16b", "resnet50")))
def test_random_plans_train_like_the_model(name: str, cache_dir: Path) -> None:
    """Loss, gradients and updated states, for random placements of everything, stage boundaries and recompute."""
    rules = model_rules(name, cache_dir)

    for seed, configuration in enumerate(SPACE[:3]):
        execution = Execution.of(name, 4, configuration.num_microbatches)
        execution.check(random_plan(execution.folded, rules, configuration, 4, seed))


@pytest.mark.parametrize("name", some(TINY, lambda name: name in ("gpt2", "mlp-xs", "mixtral-8x7b")))
def test_random_plans_with_a_split_backward_train_like_the_model(name: str, cache_dir: Path) -> None:
    """As above: gradients of inputs in one pass, those of weights in another one, later."""
    rules = model_rules(name, cache_dir)

    for seed, configuration in enumerate(SPACE[5:]):
        execution = Execution.of(name, 4, configuration.num_microbatches)
        execution.check(random_plan(execution.folded, rules, configuration, 4, 50 + seed))


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("configuration", SPACE, ids=str)
def test_many_random_plans_train_like_the_model(name: str, configuration: Configuration, cache_dir: Path) -> None:
    """As above, 8 samples and 10 plans per configuration."""
    execution = Execution.of(name, 8, configuration.num_microbatches)

    for seed in range(10):
        execution.check(random_plan(execution.folded, model_rules(name, cache_dir), configuration, 8, 100 + seed))


@pytest.mark.parametrize("name", TINY)
def test_random_plans_infer_like_the_model(name: str, cache_dir: Path) -> None:
    rules = model_rules(name, cache_dir, train=False)
    execution = Execution.of(name, 4, 2, train=False)

    for seed, mesh in enumerate((Mesh.of(outer=2, inner=2), Mesh.of(inner=4))):
        configuration = Configuration(1 + seed, mesh, 2, "forward-only")
        execution.check(random_plan(execution.folded, rules, configuration, 4, seed, train=False))


@pytest.mark.parametrize("name", some(TINY, lambda name: name not in ("resnet50", "unet-sd1", "deepseek-moe-16b")))
def test_solved_plans_train_like_the_model(name: str, cache_dir: Path) -> None:
    """The best plan of a cluster on which splitting pays."""
    execution = Execution.of(name, 4, 2)

    execution.check(solved_plan(execution.folded, model_rules(name, cache_dir), SPACE[0], 4))


@pytest.mark.parametrize(
    "name", ["llama3-8b", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "bert-base", "resnet50"))]
)
def test_solved_plans_with_little_memory_train_like_the_model(name: str, cache_dir: Path) -> None:
    """With four fifths of the memory the fastest plan takes, stages recompute and parameters are split."""
    execution = Execution.of(name, 4, 3)
    rules = model_rules(name, cache_dir)
    fastest = solved_plan(execution.folded, rules, SPACE[4], 4)
    peak = simulate(execution.program(fastest), COSTS).peak_bytes

    plan = solved_plan(execution.folded, rules, SPACE[4], 4, 0.8 * peak)

    assert any(stage.recompute != "none" for stage in plan.stages)
    execution.check(plan)


def test_microbatches_train_like_the_whole_batch(cache_dir: Path) -> None:
    """4 microbatches of 2 samples: losses add up to the mean over all 8, gradients to its gradient."""
    execution = Execution.of("gpt2", 2, 4)
    plan = random_plan(execution.folded, model_rules("gpt2", cache_dir), replace(SPACE[2], num_microbatches=4), 2, 0)
    whole = model_graph("gpt2", 8)
    names = [name for name in whole.inputs if whole.values[name].shape]
    batch = {name: np.concatenate([data[name] for data in execution.microbatches]) for name in names}

    found = run_step(execution.program(plan), execution.folded, execution.microbatches, execution.states, EXECUTOR)

    expected = run_graph(whole, {**execution.microbatches[0], **execution.states, **batch}, EXECUTOR)
    loss = {name: sum((output[name] for output in found.outputs), np.zeros(())) for name in whole.outputs}
    check_close(loss, {name: expected[name] for name in whole.outputs})
    sums = {state.owner: expected[state.output] for state in whole.states if state.role is Role.GRADIENT}
    check_close(found.gradients, sums)


@pytest.fixture(scope="module")
def execution(cache_dir: Path) -> tuple[Execution, Program]:
    """Return a small model with a program."""
    execution = Execution.of("mlp-xs", 4, 2)
    plan = random_plan(execution.folded, model_rules("mlp-xs", cache_dir), SPACE[0], 4, 0)
    return execution, execution.program(plan)


def test_feeds_are_checked(execution: tuple[Execution, Program]) -> None:
    """Number of microbatches, presence and shape of every input and state."""
    case, program = execution
    data, states = case.microbatches, dict(case.states)
    name = case.folded.graph.parameters[0].name

    with pytest.raises(ModelError, match="1 microbatches for a program of 2"):
        run_step(program, case.folded, data[:1], states)
    with pytest.raises(ModelError, match=f"no data for value '{name}'\n  hint: feed every input and every state"):
        run_step(program, case.folded, data, {key: array for key, array in states.items() if key != name})
    with pytest.raises(ModelError, match=rf"value {name}: float64\[16,16\] is fed with data of shape \[2, 2\]"):
        run_step(program, case.folded, data, states | {name: np.zeros((2, 2))})


def _with(program: Program, changed: Segment) -> Program:
    """Return the program with one segment replaced."""
    same = [(s.kind, s.phase) == (changed.kind, changed.phase) for s in program.segments]
    return replace(
        program, segments=tuple(changed if hit else s for hit, s in zip(same, program.segments, strict=True))
    )


def test_a_missing_sum_shows_in_the_numbers(execution: tuple[Execution, Program]) -> None:
    """If the terms of a gradient are taken for copies of it, the executor says that the copies differ."""
    case, program = execution
    segment, index, collective = next(
        (segment, index, instruction)
        for segment in program.segments
        for index, instruction in enumerate(segment.instructions)
        if isinstance(instruction, Collective) and instruction.kind == "reduce_scatter"
    )
    wrong = Collective.__new__(Collective)
    for field in Collective.__dataclass_fields__:
        object.__setattr__(wrong, field, getattr(collective, field))
    object.__setattr__(wrong, "source", Replicate())
    instructions = (*segment.instructions[:index], wrong, *segment.instructions[index + 1 :])

    with pytest.raises(ProgramError, match="copies of one tensor hold different values"):
        run_step(
            _with(program, replace(segment, instructions=instructions)), case.folded, case.microbatches, case.states
        )


def test_a_wrong_shape_is_an_error_that_names_the_instruction(execution: tuple[Execution, Program]) -> None:
    case, program = execution
    segment = next(s for s in program.segments if s.phase is SegmentPhase.FORWARD)
    first = segment.instructions[0]
    (made,) = (first.outputs[0] if isinstance(first, Compute) else first.result,)
    assert made is not None
    other = replace(made, shape=(1, 1))
    if isinstance(first, Compute):
        first = replace(first, outputs=(other, *first.outputs[1:]))
    else:
        first = replace(first, result=other)

    with pytest.raises(ProgramError, match=r"block 0 forward: '.*' is \[.*\] in\n  .*: \[1, 1\]"):
        run_step(
            _with(program, replace(segment, instructions=(first, *segment.instructions[1:]))),
            case.folded,
            case.microbatches,
            case.states,
        )


def test_a_forgotten_update_is_an_error(execution: tuple[Execution, Program]) -> None:
    case, program = execution
    kept = tuple(segment for segment in program.segments if segment.phase is not SegmentPhase.UPDATE)

    with pytest.raises(ProgramError, match=r"does not compute '.*', the new"):
        run_step(replace(program, segments=kept), case.folded, case.microbatches, case.states)


def test_schedules_of_the_sweep_are_all_there_are() -> None:
    """A new schedule belongs into `SPACE`, too."""
    assert {configuration.schedule for configuration in SPACE} | {"forward-only", "interleaved"} == SCHEDULES.keys()

"""Plans read back as schedules of tactics: those people would name where they agree, the rest as it stands."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

from autopar.context_parallelism import CONTEXT_KINDS
from autopar.discover import Rules
from autopar.errors import PlanError, TacticError
from autopar.folding.fold import Folded
from autopar.formulate.op_placement import op_placement
from autopar.plan import OpPlacement, Plan
from autopar.sharding import Placement, Shard, parse_placements
from autopar.tactics.apply import Applier, Splitting
from autopar.tactics.records import (
    ContextParallel,
    DataParallel,
    ExpertParallel,
    Megatron,
    Offload,
    Pipeline,
    Place,
    Recompute,
    SequenceParallel,
    Tactic,
    ZeRO,
)
from autopar.tactics.state import OpKey, State, Topology, sharded_dim

_TASKS = (ExpertParallel, DataParallel, ContextParallel, Megatron)


def tactics_of(plan: Plan, folded: Folded, rules: Rules, batch: Mapping[str, int]) -> tuple[Tactic, ...]:
    """Return a schedule that makes the same plan again: the same blocks, stages and schedule.

    Of the tactics people would name, those are taken whose every decision, propagation included, is the plan's;
    `Place` holds everything else.

    Args:
        plan: The plan.
        folded: The graph of its microbatch.
        rules: What its ops can do.
        batch: The batch dim of every value that has one.

    Raises:
        PlanError: If an op is placed as no rule allows, stages have meshes or placements of their own, or rows have
            different shares of the batch.
    """
    if plan.variants:
        raise PlanError(
            f"stages have {len(plan.variants) + 1} variants of mesh and placements; tactics split all stages alike",
            hint="leave --tactics away: the placements of every stage are listed",
        )
    if plan.shares:
        raise PlanError(
            "no tactic gives rows of devices different shares of the batch",
            hint="leave --tactics away: the placements are listed",
        )
    topology = Topology(folded, rules, plan.device_mesh)
    chosen = chosen_in(plan, topology)
    values = _values(plan)
    state = State(topology)
    applier = Applier(state, batch)
    found: list[Tactic] = []
    tasks: dict[str, type[Tactic]] = {}  # an axis splits the batch, the sequence or pairs of products
    for tactic in _named(plan):
        if isinstance(tactic, _TASKS) and tasks.setdefault(tactic.axis, type(tactic)) is not type(tactic):
            continue
        trial = state.copy()
        try:
            applier.of(trial).apply(tactic, len(found))
        except TacticError:  # the model has nothing that this could split
            trial = state
        if trial.splits != state.splits and _agrees(trial, chosen, values):
            state = trial
            found.append(tactic)
        elif isinstance(tactic, _TASKS) and not any(getattr(own, "axis", None) == tactic.axis for own in found):
            del tasks[tactic.axis]
    rest = _rest(plan, topology, chosen, state)
    sizes = tuple(stage.blocks[1] - stage.blocks[0] for stage in plan.stages)
    groups = len({stage.devices for stage in plan.stages})
    found += [rest, Pipeline(sizes, plan.schedule, plan.num_microbatches, len(sizes) // groups)]
    for number, stage in enumerate(plan.stages):
        if stage.recompute != "none":
            flavours = stage.flavours
            runs = " ".join(f"{flavour}*1" for flavour in flavours)
            found.append(Recompute(runs, (number,)))
        if stage.offload:
            found.append(Offload(stage.offload, (number,)))
    return tuple(found)


def chosen_in(plan: Plan, topology: Topology) -> dict[OpKey, dict[int, int]]:
    """Return by op and axis the number of the strategy a plan has.

    Raises:
        PlanError: If an op is placed as no rule allows.
    """
    found = {}
    for block in plan.blocks:
        ops = topology.folded.kinds[block.kind].ops
        if len(ops) != len(block.ops):
            raise PlanError(f"block {block.kind} of the plan has other ops than the model", hint="solve again")
        for position, placed in enumerate(block.ops):
            key = (block.kind, position)
            numbers = _numbers(topology, key, placed)
            if numbers is None:
                raise PlanError(f"op {placed.op!r} is placed as no rule allows", hint="solve again")
            found[key] = dict(enumerate(numbers))
    return found


def _numbers(topology: Topology, key: OpKey, placed: OpPlacement) -> tuple[int, ...] | None:
    op, strategies, values = topology.ops[key], topology.strategies(key), topology.folded.graph.values
    texts = (*placed.inputs, *placed.outputs)
    by_axis = []
    for axis in range(len(topology.mesh.axes)):
        wanted = [parse_placements(text)[axis] if text else None for text in texts]
        by_axis.append(
            [
                number
                for number, strategy in enumerate(strategies)
                if all(
                    _is_of(own, other) for own, other in zip(wanted, (*strategy.inputs, *strategy.outputs), strict=True)
                )
            ]
        )
    for numbers in product(*by_axis):
        if op_placement(op, [strategies[number] for number in numbers], topology.mesh, values) == placed:
            return numbers
    return None


def _is_of(placement: Placement | None, strategy: Placement) -> bool:
    """Whether a placement, if there is one, is what a strategy says; it may deal a dim out in uneven blocks."""
    even = replace(placement, whole=0) if isinstance(placement, Shard) else placement
    return even in (None, strategy)


def _named(plan: Plan) -> Iterator[Splitting]:
    """Yield the tactics people would name, in the order in which they would."""
    axes = [axis.name for axis in plan.mesh]
    for axis in axes:
        yield ExpertParallel(axis)
    for axis in axes:
        yield DataParallel(axis)
        yield from (ContextParallel(axis, kind) for kind in CONTEXT_KINDS)
    for axis in axes:
        yield Megatron(axis, vocabulary=True)
        yield Megatron(axis)
    for axis in axes:
        yield SequenceParallel(axis)
    for axis in axes:
        for stage, dims in product((3, 2, 1), (1, 2)):
            yield ZeRO(stage, axis, dims)


def _agrees(state: State, chosen: dict[OpKey, dict[int, int]], values: dict[str, str]) -> bool:
    """Whether everything decided so far is as in a plan."""
    for key, numbers in state.chosen.items():
        if any(chosen[key][axis] != number for axis, number in numbers.items()):
            return False
    for name, text in values.items():
        placements = parse_placements(text)
        for axis, placement in enumerate(placements):
            decided = state.split(name, axis)
            dim = sharded_dim(placement)
            if decided is not None and decided.dim != (-1 if dim is None else dim):
                return False
    return True


def _rest(plan: Plan, topology: Topology, chosen: dict[OpKey, dict[int, int]], state: State) -> Place:
    """Return what is still to be said of a plan."""
    ops: dict[str, str] = {}
    for key, numbers in chosen.items():
        if state.chosen.get(key, {}) != numbers:
            strategies = topology.strategies(key)
            ops[topology.ops[key].name] = " | ".join(str(strategies[numbers[axis]]) for axis in sorted(numbers))
    copies = {item.value: item.placement for block in plan.blocks for item in block.copies}
    return Place(ops, _values(plan), copies)


def _values(plan: Plan) -> dict[str, str]:
    """Return where a plan has parameters, and what passes between blocks."""
    return {
        item.value: item.placement
        for block in plan.blocks
        for item in (*block.states, *block.arrivals, *block.departures)
    }

"""The level of ZeRO that every parameter of a plan has on every axis, read off its placements."""

from collections.abc import Iterator

from autopar.folding.fold import Folded
from autopar.formulate.zero import LEVELS
from autopar.ir.graph import Phase, Role
from autopar.plan import Plan
from autopar.sharding import Placements, Shard, parse_placements


def levels_of(plan: Plan, folded: Folded) -> Iterator[tuple[str, str, frozenset[int]]]:
    """Yield parameter, axis and levels (as `autopar.formulate.zero` has them) of all that could be split on the axis.

    A trained parameter has one level. A frozen one that is whole has every level below 3, which differ in gradients
    and optimizer state only.

    Args:
        plan: The plan.
        folded: The graph of one of its microbatches.
    """
    stored: dict[str, Placements] = {}
    used: dict[str, list[Placements]] = {}
    made: dict[str, Placements] = {}
    for block in plan.blocks:
        ops = folded.kinds[block.kind].ops
        for item in block.states:
            stored[item.value] = parse_placements(item.placement)
        for op, placed in zip(ops, block.ops, strict=True):
            if op.phase is not Phase.UPDATE:
                for name, text in zip(op.inputs, placed.inputs, strict=True):
                    if name and text:
                        used.setdefault(name, []).append(parse_placements(text))
            made |= {
                name: parse_placements(text) for name, text in zip(op.outputs, placed.outputs, strict=True) if text
            }
    outputs: dict[str, dict[Role, str]] = {}
    for state in folded.graph.states:
        if state.output != state.input and state.output in made:
            outputs.setdefault(state.owner, {})[state.role] = state.output
    for name, placements in stored.items():
        own = outputs.get(name, {})
        is_trained = {Role.GRADIENT, Role.PARAMETER} <= own.keys()
        for index, axis in enumerate(plan.mesh):
            if axis.size == 1:
                continue
            is_used_whole = not all(isinstance(use[index], Shard) for use in used.get(name, []))
            if isinstance(placements[index], Shard):
                if is_used_whole:
                    yield name, axis.name, frozenset({3})
            elif is_trained and isinstance(made[own[Role.GRADIENT]][index], Shard):
                yield name, axis.name, frozenset({2})
            elif is_trained and isinstance(made[own[Role.PARAMETER]][index], Shard):
                yield name, axis.name, frozenset({1})
            elif _could_be_split(folded.graph.values[name].shape, placements, plan, index):
                if is_trained:
                    yield name, axis.name, frozenset({0})
                elif is_used_whole:
                    yield name, axis.name, LEVELS - {3}


def _could_be_split(shape: tuple[int, ...], placements: Placements, plan: Plan, axis: int) -> bool:
    """Whether some dim could be divided over an axis beside those that split it already."""
    for dim, size in enumerate(shape):
        parts = plan.mesh[axis].size
        for other, placement in zip(plan.mesh, placements, strict=True):
            if isinstance(placement, Shard) and placement.dim == dim:
                parts *= other.size * placement.chunks
        if size % parts == 0:
            return True
    return False

"""Placements of the tensors of a whole model, read off the decisions a plan holds by distinct block."""

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import ExportError
from autopar.folding.fold import Folded
from autopar.ir.blocks import instance_ops
from autopar.ir.graph import Op, Phase, Role, Value
from autopar.plan import OpPlacement, Plan
from autopar.sharding import Placements, Shard, parse_placements


@dataclass(frozen=True, slots=True)
class ParameterPlacement:
    """Where a parameter lies.

    Attributes:
        value: The parameter.
        stored: Placements between steps.
        update: Placements of its optimizer state; those of `stored` if nothing is trained.
        stages: Stages whose forward reads it.
    """

    value: Value
    stored: Placements
    update: Placements
    stages: tuple[int, ...]


def stage_of_block(plan: Plan) -> dict[int, int]:
    """Return the stage of every block of the chain."""
    return {block: index for index, stage in enumerate(plan.stages) for block in range(*stage.blocks)}


def check_even(plan: Plan, name: str) -> None:
    """Refuse a plan that stores parameters in uneven blocks.

    Args:
        plan: The plan.
        name: Name of the framework in sentences.

    Raises:
        ExportError: If it does.
    """
    for block in (block for variant in plan.all_variants for block in variant.blocks):
        for state in block.states:
            for placement, axis in zip(parse_placements(state.placement), plan.mesh, strict=True):
                if isinstance(placement, Shard) and placement.whole:
                    raise ExportError(
                        f"{state.value!r} has {placement.whole} rows or columns, which the {axis.size} devices of axis "
                        f"{axis.name!r} do not divide: {name} refuses such shardings",
                        hint=f"pad it to {-(-placement.whole // axis.size) * axis.size} in the model, or plan with "
                        "`uneven: false` in the software stack, as `--for maxtext` does",
                    )


def parameter_placements(plan: Plan, folded: Folded) -> tuple[ParameterPlacement, ...]:
    """Return where every parameter of the model lies, in the model's order."""
    graph = folded.graph
    stored = {state.value: state.placement for block in plan.blocks for state in block.states}
    moments = {state.input for state in graph.states if state.role is Role.MOMENT}
    updates: dict[str, str] = {}
    for block in plan.blocks:
        for op, placed in zip(folded.kinds[block.kind].ops, block.ops, strict=True):
            if op.phase is Phase.UPDATE:
                texts = [text for name, text in zip(op.inputs, placed.inputs, strict=True) if name in moments]
                updates[op.origin] = texts[0] if texts else placed.inputs[0]
    representatives = {item.producer: item.value.name for item in folded.parameters}
    stages = stage_of_block(plan)
    used: dict[str, dict[int, None]] = {}
    for op in graph.ops:
        if op.phase is Phase.FORWARD:
            for name in op.inputs:
                used.setdefault(name, {})[stages[op.block]] = None
    found = []
    for value in graph.parameters:
        name = representatives[folded.by_value[value.name]]
        text = stored[name]
        found.append(
            ParameterPlacement(
                value,
                parse_placements(text),
                parse_placements(updates.get(name, text)),
                tuple(used.get(value.name, ())),
            )
        )
    return tuple(found)


def input_placements(plan: Plan, folded: Folded) -> Mapping[str, Placements]:
    """Return where the data of a microbatch arrive: as the first op of the forward reads them."""
    found: dict[str, Placements] = {}
    for op, placed, _ in placed_ops(plan, folded):
        for name, text in zip(op.inputs, placed.inputs, strict=True):
            if name in folded.graph.inputs:
                found.setdefault(name, parse_placements(text))
    return {name: found[name] for name in folded.graph.inputs if name in found}


def boundary_placements(plan: Plan, folded: Folded) -> Mapping[str, tuple[Value, Placements, tuple[int, ...]]]:
    """Return values of the forward that leave a distinct block: type, placements, and the instances of the block."""
    producers = folded.graph.producers()
    return {
        item.value: (folded.graph.values[item.value], parse_placements(item.placement), block.instances)
        for block in plan.blocks
        for item in block.departures
        if producers[item.value].phase is Phase.FORWARD
    }


def placed_ops(plan: Plan, folded: Folded) -> list[tuple[Op, OpPlacement, int]]:
    """Return every forward op of the model with its placement and its block, in program order."""
    instances = instance_ops(folded.graph)
    by_name: dict[str, tuple[OpPlacement, int]] = {}
    for number in range(len(plan.all_variants)):
        for block in plan.of_variant(number).blocks:
            for index in block.instances:
                for op, placed in zip(instances[index], block.ops, strict=True):
                    by_name[op.name] = (placed, index)
    return [(op, *by_name[op.name]) for op in folded.graph.ops if op.phase is Phase.FORWARD]


def has_chunks(placements: Placements) -> bool:
    """Whether a tensor is sharded in chunks (block-cyclic)."""
    return any(getattr(placement, "chunks", 1) > 1 for placement in placements)

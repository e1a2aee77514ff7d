"""The sharded graph, block by block: what one device of a stage runs, with placements, and where each op is drawn."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from autopar.page.records import BlockGraph, Node, Sharded
from autopar.plan import Plan
from autopar.program.records import (
    Collective,
    Compute,
    Exchange,
    Fetch,
    Instruction,
    Offload,
    Operand,
    Program,
    Segment,
    SegmentPhase,
    Slice,
    StageProgram,
    defines,
    reads,
)
from autopar.program.units import bytes_together, units_of
from autopar.report.summary import format_range
from autopar.sharding import Mesh, Shard, parse_placements
from autopar.simulate import Costs
from autopar.simulate.layout import Resource, lay_out

COLUMNS = 6
"""Nodes side by side in a drawing, so that their names can be read."""
_SWEEPS = 4  # passes over the rows that move nodes towards those they are connected with


def block_graphs(
    plan: Plan, program: Program, costs: Costs, roles: Sequence[Mapping[str, str]]
) -> tuple[BlockGraph, ...]:
    """Return each distinct block of a program in each phase it has instructions for; `roles` of mesh axes by stage."""
    phases = list(SegmentPhase)
    segments = sorted(program.segments, key=lambda segment: phases.index(segment.phase))
    graphs = []
    for kind, (stage, places) in _kinds(program).items():
        view = costs.on(range(*stage.devices))
        states = tuple(
            (state.value, tuple(map(str, parse_placements(state.placement))))
            for state in plan.block_plan(places[0]).states
        )
        axes, sizes = tuple(axis.name for axis in stage.mesh.axes), stage.mesh.shape
        graphs += [
            BlockGraph(
                _blocks(places),
                len(places),
                str(segment.phase),
                axes,
                sizes,
                roles[stage.index],
                _nodes(segment, view, stage.mesh),
                states,
            )
            for segment in segments
            if segment.kind == kind and segment.instructions
        ]
    return tuple(graphs)


def _kinds(program: Program) -> dict[int, tuple[StageProgram, list[int]]]:
    """Return for each kind of block a stage that has it, and its places in the chain."""
    found: dict[int, tuple[StageProgram, list[int]]] = {}
    for place, (stage, kind) in enumerate(program.blocks()):
        found.setdefault(kind, (stage, []))[1].append(place)
    return found


def _blocks(places: Sequence[int]) -> str:
    """Return places in the chain for reading.

    >>> _blocks([3]), _blocks([1, 2, 3]), _blocks([0, 1, 2, 6])
    ('block 3', 'blocks 1-3: 3 equal ones', 'blocks 0-2, 6: 4 equal ones')
    """
    runs: list[list[int]] = []
    for place in places:
        if runs and runs[-1][1] == place:
            runs[-1][1] = place + 1
        else:
            runs.append([place, place + 1])
    which = ", ".join(map(format_range, runs))
    return f"block {which}" if len(places) == 1 else f"blocks {which}: {len(places)} equal ones"


def _nodes(segment: Segment, costs: Costs, mesh: Mesh) -> tuple[Node, ...]:
    kernels = iter(span.seconds for span in lay_out(segment, costs).spans if span.resource is Resource.COMPUTE)
    made: dict[str, int] = {}
    tensors, units = _persistent(segment), units_of(segment)
    described: list[tuple[Instruction, float, tuple[int, ...], tuple[Sharded, ...]]] = []
    for position, instruction in enumerate(segment.instructions):
        sources = tuple(dict.fromkeys(made[value.value] for value in reads(instruction) if value.value in made))
        made.update((value.value, position) for value in defines(instruction))
        parameters: tuple[Sharded, ...] = ()
        match instruction:
            case Compute():
                seconds = next(kernels)
                parameters = tuple(
                    _sharded(tensors[value.value], value, mesh)
                    for value in instruction.inputs
                    if value is not None and value.value in tensors
                )
            case Collective():
                together = bytes_together(instruction, units)
                seconds = float(
                    costs.collective_seconds(instruction.kind, together, instruction.axis, instruction.routed)
                )
                seconds *= instruction.bytes / together if together else 1.0
            case Exchange():
                seconds = float(costs.exchange_seconds(instruction.bytes, instruction.axis))
            case Slice():
                seconds = 0.0
            case Offload(bytes=size):
                seconds = costs.cluster.known_host().out_seconds(size)
            case Fetch(bytes=size):
                seconds = costs.cluster.known_host().back_seconds(size)
        if not isinstance(instruction, Compute) and instruction.operand.value in tensors:
            tensors[instruction.result.value] = tensors[instruction.operand.value]
        described.append((instruction, seconds, sources, parameters))
    places = arrange([sources for _, _, sources, _ in described])
    return tuple(_node(*entry, mesh, *place) for entry, place in zip(described, places, strict=True))


def _persistent(segment: Segment) -> dict[str, str]:
    """Return the tensors that a segment's external values are, by value: parameters, and states in the update."""
    named = {part.value: part.tensor for part in segment.parts}
    return {value.value: named[value.value] for value in segment.external if value.value in named and value.shape}


def _sharded(name: str, value: Operand, mesh: Mesh) -> Sharded:
    """Return a value with its global shape."""
    whole = list(value.shape)
    for placement, axis in zip(value.placements, mesh.axes, strict=False):
        if isinstance(placement, Shard):
            whole[placement.dim] *= axis.size
    return Sharded(name, tuple(whole), value.shape, tuple(map(str, value.placements)), value.bytes)


def _node(
    instruction: Instruction,
    seconds: float,
    sources: tuple[int, ...],
    parameters: tuple[Sharded, ...],
    mesh: Mesh,
    column: float,
    row: int,
) -> Node:
    results = defines(instruction)
    result = _sharded("", results[0] if results else Operand("", (), 0.0), mesh)
    beside, ring, passed = False, "", 0.0
    match instruction:
        case Compute(op=op):
            if instruction.ring is not None:
                ring, passed = instruction.ring.name, instruction.passed_bytes
            name, kind, over, change = op.name, op.kind, "", result.placements
            size = sum(each.bytes for each in results)
        case Collective(axis=axis, bytes=size):
            name, kind, over, beside = instruction.operand.value, str(instruction.kind), axis.name, instruction.overlaps
            change = (f"{instruction.source} > {instruction.target}",)
        case Exchange(axis=axis, bytes=size):
            name, kind, over = instruction.operand.value, "exchange", axis.name
            change = (f"{instruction.before} before, {instruction.after} after",)
        case Offload(bytes=size) | Fetch(bytes=size):
            name, over, change = instruction.operand.value, "", ()
            kind = "offload" if isinstance(instruction, Offload) else "fetch"
        case Slice(axis=axis, target=target):
            name, kind, over, size = instruction.operand.value, "slice", axis.name, instruction.result.bytes
            change = (f"R > {target}",)
    return Node(name, kind, over, result, parameters, change, size, seconds, beside, sources, column, row, ring, passed)


def arrange(sources: Sequence[Sequence[int]]) -> list[tuple[float, int]]:
    """Return column and row of each instruction of a drawing: below what it reads, near what it is connected with.

    Args:
        sources: For each instruction the earlier ones it reads from.

    >>> arrange([(), (0,), (0,), (1, 2)])
    [(0.0, 0), (-0.5, 1), (0.5, 1), (0.0, 2)]
    """
    readers: list[list[int]] = [[] for _ in sources]
    depth: list[int] = []
    for i, before in enumerate(sources):
        depth.append(max((depth[j] + 1 for j in before), default=0))
        for j in before:
            readers[j].append(i)
    for i in reversed(
        range(len(sources))
    ):  # what is needed late, such as a gathered parameter, stands where it is used
        depth[i] = min((depth[j] - 1 for j in readers[i]), default=depth[i])
    rows: list[list[int]] = [[] for _ in range(max(depth, default=-1) + 1)]
    for i, level in enumerate(depth):
        rows[level].append(i)
    column = [0.0] * len(sources)
    for sweep in range(_SWEEPS):
        near = sources if sweep % 2 == 0 else readers
        for row in rows if sweep % 2 == 0 else rows[::-1]:
            row.sort(key=lambda i: fmean(column[j] for j in near[i]) if near[i] else column[i])
            for place, i in enumerate(row):
                column[i] = place - (len(row) - 1) / 2
    found = [(0.0, 0)] * len(sources)
    line = 0
    for row in rows:
        for start in range(0, len(row), COLUMNS):
            part = row[start : start + COLUMNS]
            for place, i in enumerate(part):
                found[i] = (place - (len(part) - 1) / 2, line)
            line += 1
    return found

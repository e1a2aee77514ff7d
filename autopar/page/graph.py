"""The sharded graph, block by block: what one device of a stage runs, with placements, and where each op is drawn."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from autopar.page.records import BlockGraph, Node
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
from autopar.report.summary import format_range
from autopar.sharding import parse_placements
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
        axes = tuple(axis.name for axis in stage.mesh.axes)
        graphs += [
            BlockGraph(
                _blocks(places),
                len(places),
                str(segment.phase),
                axes,
                roles[stage.index],
                _nodes(segment, view),
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


def _nodes(segment: Segment, costs: Costs) -> tuple[Node, ...]:
    kernels = iter(span.seconds for span in lay_out(segment, costs).spans if span.resource is Resource.COMPUTE)
    made: dict[str, int] = {}
    described: list[tuple[Instruction, float, tuple[int, ...]]] = []
    for position, instruction in enumerate(segment.instructions):
        sources = tuple(dict.fromkeys(made[value.value] for value in reads(instruction) if value.value in made))
        made.update((value.value, position) for value in defines(instruction))
        match instruction:
            case Compute():
                seconds = next(kernels)
            case Collective():
                seconds = float(
                    costs.collective_seconds(instruction.kind, instruction.bytes, instruction.axis, instruction.routed)
                )
            case Exchange():
                seconds = float(costs.exchange_seconds(instruction.bytes, instruction.axis))
            case Slice():
                seconds = 0.0
            case Offload(bytes=size):
                seconds = costs.cluster.known_host().out_seconds(size)
            case Fetch(bytes=size):
                seconds = costs.cluster.known_host().back_seconds(size)
        described.append((instruction, seconds, sources))
    places = arrange([sources for _, _, sources in described])
    return tuple(_node(*entry, *place) for entry, place in zip(described, places, strict=True))


def _node(instruction: Instruction, seconds: float, sources: tuple[int, ...], column: float, row: int) -> Node:
    match instruction:
        case Compute(op=op):
            results = defines(instruction)
            first = results[0] if results else Operand("", (), 0.0)
            size = sum(result.bytes for result in results)
            placed = tuple(map(str, first.placements))
            return Node(op.name, op.kind, "", first.shape, placed, size, seconds, False, sources, column, row)
        case Collective(kind=kind, axis=axis, operand=operand, result=result):
            change = (f"{instruction.source} > {instruction.target}",)
            return Node(
                operand.value, str(kind), axis.name, result.shape, change, instruction.bytes, seconds,
                instruction.overlaps, sources, column, row,
            )  # fmt: skip
        case Exchange(axis=axis, operand=operand, result=result):
            change = (f"{instruction.before} before, {instruction.after} after",)
            return Node(
                operand.value, "exchange", axis.name, result.shape, change, instruction.bytes, seconds,
                False, sources, column, row,
            )  # fmt: skip
        case Offload(operand=operand, result=result) | Fetch(operand=operand, result=result):
            name = "offload" if isinstance(instruction, Offload) else "fetch"
            return Node(
                operand.value, name, "", result.shape, (), instruction.bytes, seconds, False, sources, column, row
            )
        case Slice(axis=axis, operand=operand, result=result, target=target):
            change = (f"R > {target}",)
            return Node(
                operand.value, "slice", axis.name, result.shape, change, result.bytes, 0.0, False, sources, column, row
            )


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

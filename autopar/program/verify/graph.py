"""Whether a program computes the graph it was lowered from.

A value of a program is some tensor of the graph: parts say which one at the edges of a segment, an op defines those it
names, a collective hands on what it reads. So it can be followed by name who reads what.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from autopar.discover import Rules
from autopar.errors import ProgramError
from autopar.folding.fold import BlockKind, Folded
from autopar.ir.functions import DOMAIN, FUNCTIONS
from autopar.ir.graph import Attr, Graph, Op, Role
from autopar.program.kinds import graph_kind
from autopar.program.records import (
    HOST_PHASES,
    Compute,
    Exchange,
    Operand,
    Program,
    Segment,
    SegmentPhase,
    defines,
    reads,
    saved_for,
    segment_phase,
)
from autopar.program.verify.exchanges import verify_exchanges
from autopar.program.verify.fault import fault, title
from autopar.program.verify.rules import Halos, strategy_problem
from autopar.program.verify.shapes import whole_shape
from autopar.sharding import Mesh, format_placements


def verify_graph(program: Program, folded: Folded, rules: Rules | None, doubt: Callable[[str], None] | None) -> None:
    """Check that a program computes a graph, and runs its ops by their rules if these are given.

    Args:
        program: The program.
        folded: The graph.
        rules: The rules of its ops; None to believe whatever is claimed of them.
        doubt: Told of an op that runs by no strategy of its rule; None to raise an error.

    Raises:
        ProgramError: If it does not.
    """
    chain = tuple(graph_kind(folded, kind) for _, kind in program.blocks())
    if chain != folded.chain:
        raise ProgramError(f"the program has the blocks {chain}, the graph {folded.chain}")
    table, tensors, states = program.table(), _Tensors(), _States.of(folded)
    meshes = {kind: stage.mesh for stage in program.stages for kind in stage.blocks}
    for kind, mesh in sorted(meshes.items()):
        _Check(folded, kind, mesh, rules, tensors, states, doubt).run(table)
    verify_exchanges(program, folded, tensors.of)


@dataclass(frozen=True, slots=True)
class _Tensors:
    """Which tensor of its representative each value of a segment is, by kind and phase."""

    of: dict[tuple[int, SegmentPhase], dict[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _States:
    """What a step makes of what stays: the new content by name, and the sums of gradients by what they began as."""

    inputs: dict[str, str]
    sums: dict[str, str]

    @classmethod
    def of(cls, folded: Folded) -> "_States":
        changed = [state for state in folded.graph.states if state.output != state.input]
        return cls(
            {state.output: state.input for state in changed},
            {state.input: state.output for state in changed if state.role is Role.GRADIENT},
        )


class _Check:
    """Follows the values of one kind of block."""

    def __init__(
        self,
        folded: Folded,
        number: int,
        mesh: Mesh,
        rules: Rules | None,
        tensors: _Tensors,
        states: _States,
        doubt: Callable[[str], None] | None,
    ) -> None:
        self._doubt = doubt
        self._graph, self._number, self._mesh, self._rules, self._tensors = folded.graph, number, mesh, rules, tensors
        self._kind: BlockKind = folded.kinds[graph_kind(folded, number)]
        self._ops = {op.name: op for op in self._kind.ops}
        self._states, self._sums = states.inputs, states.sums
        self._done: set[str] = set()
        self._written: set[str] = set()
        self._stored: dict[str, str] = {}

    def run(self, table: Mapping[tuple[int, SegmentPhase], Segment]) -> None:
        """Check all segments, in the order in which they run."""
        saved: dict[str, str] = {}
        for phase in SegmentPhase:
            segment = table.get((self._number, phase))
            if segment is None:
                continue
            if phase is SegmentPhase.AGAIN:  # part of the forward, word for word
                self._tensors.of[segment.kind, phase] = self._tensors.of[segment.kind, SegmentPhase.FORWARD]
                continue
            if phase in HOST_PHASES:  # copies of what others make
                self._tensors.of[segment.kind, phase] = {part.value: part.tensor for part in segment.parts}
                continue
            kept = saved_for(segment.kind, phase, table)
            known = self._enter(segment, {operand.value: saved[operand.value] for operand in kept})
            self._follow(segment, known)
            self._leave(segment, known)
            saved |= {operand.value: known[operand.value] for operand in segment.saved}
            self._tensors.of[segment.kind, phase] = known
        for op in self._kind.ops:
            if op.name not in self._done:
                raise ProgramError(f"kind {self._number} does not compute op {op.name!r}")
            for name in op.outputs:
                if name in self._states and name not in self._written:
                    raise ProgramError(
                        f"kind {self._number} does not store {name!r}, the new content of {self._states[name]!r}"
                    )

    def _enter(self, segment: Segment, saved: Mapping[str, str]) -> dict[str, str]:
        """Return what the values are that a segment finds."""
        parts = {part.value: part.tensor for part in segment.parts}
        known = dict(saved)
        for operand in (*segment.inputs, *segment.external):
            tensor = parts.get(operand.value, self._stored.get(operand.value))
            if tensor is None:
                raise ProgramError(f"{title(segment)}: {operand.value!r} is no part of any tensor")
            if tensor not in self._graph.values:
                raise ProgramError(f"{title(segment)}: {operand.value!r} is a part of {tensor!r}, which there is not")
            if operand.value in parts:
                self._verify_shape(segment, None, operand, tensor)
            if segment.phase in (SegmentPhase.REDUCE, SegmentPhase.UPDATE):
                tensor = self._sums.get(tensor, tensor)  # all microbatches are in it
            known[operand.value] = tensor
        return known

    def _follow(self, segment: Segment, known: dict[str, str]) -> None:
        """Check the instructions, noting what they define."""
        halos: dict[str, Halos] = {}
        for index, instruction in enumerate(segment.instructions):
            if isinstance(instruction, Compute):
                self._verify_compute(segment, index, instruction, known, halos)
                continue
            (before,), (after,) = reads(instruction), defines(instruction)
            known[after.value] = known[before.value]
            around = halos.get(before.value, frozenset())
            if isinstance(instruction, Exchange):
                rows = (instruction.before, instruction.after)
                around |= {(instruction.axis, instruction.dim, *rows, instruction.fill)}
            if around:
                halos[after.value] = around
            else:
                self._verify_shape(segment, index, after, known[after.value])

    def _verify_compute(
        self, segment: Segment, index: int, compute: Compute, known: dict[str, str], halos: Mapping[str, Halos]
    ) -> None:
        op, original = compute.op, self._ops.get(compute.op.name)
        if original is None or op.name in self._done:
            raise fault(segment, index, f"op {op.name!r} {'is computed twice' if original else 'is none of the graph'}")
        self._done.add(op.name)
        if (op.inputs, op.outputs) != (original.inputs, original.outputs):
            raise fault(segment, index, f"op {op.name!r} reads and defines other values in the graph")
        if self._rules is None or self._doubt is not None:  # else the rules say exactly what runs on a shard
            has_halo = any(operand is not None and operand.value in halos for operand in compute.inputs)
            problem = _form_problem(compute, original, self._graph, has_halo=has_halo)
            if problem:
                raise fault(segment, index, problem)
        if segment.phase not in _phases(original):
            raise fault(segment, index, f"op {op.name!r} belongs to the {segment_phase(original.phase)} segment")
        for name, operand in zip(op.inputs, compute.inputs, strict=True):
            found = known[operand.value] if operand is not None else ""
            if found != name:
                raise fault(
                    segment, index, f"op {op.name!r} reads {name or 'nothing'!r} and gets {found or 'nothing'!r}"
                )
            if operand is not None and operand.value not in halos:
                self._verify_shape(segment, index, operand, name)
        for name, operand in zip(op.outputs, compute.outputs, strict=True):
            if operand is not None:
                known[operand.value] = name
                self._verify_shape(segment, index, operand, name)
        if self._rules is not None:
            around = [halos.get(operand.value, frozenset()) if operand else frozenset() for operand in compute.inputs]
            rule = self._rules.by_op.get(op.name)
            if rule is None or rule.kind != original.kind:
                raise fault(segment, index, f"there is no rule for op {op.name!r} of kind {original.kind}")
            problem = strategy_problem(compute, original, rule, around, self._graph, self._mesh)
            if problem and self._doubt is None:
                raise fault(segment, index, problem)
            if problem and self._doubt is not None:
                self._doubt(problem)

    def _verify_shape(self, segment: Segment, index: int | None, operand: Operand, tensor: str) -> None:
        """Check that a value is the block of its tensor that its placements say."""
        if len(operand.placements) != len(self._mesh.axes):
            raise ProgramError(f"{title(segment)}: {operand.value!r} does not say how it lies on mesh {self._mesh}")
        if whole_shape(operand, self._mesh) != self._graph.values[tensor].shape:
            problem = (
                f"{operand.value!r} is {list(operand.shape)} as {format_placements(operand.placements)} "
                f"of {self._graph.values[tensor]}"
            )
            raise ProgramError(f"{title(segment)}: {problem}") if index is None else fault(segment, index, problem)

    def _leave(self, segment: Segment, known: Mapping[str, str]) -> None:
        """Note what a segment stores."""
        parts = {part.value for part in segment.parts}
        for part in segment.parts:
            tensor = known[part.value]
            if part.tensor not in (tensor, self._states.get(tensor)):
                raise ProgramError(f"{title(segment)}: {part.value!r} is {tensor!r}, and no part of {part.tensor!r}")
        for store in segment.stores:
            tensor = known[store.value.value]
            if store.value.value not in parts:
                self._stored[store.target] = tensor
            elif self._states.get(tensor) != store.target:
                raise ProgramError(f"{title(segment)} stores {tensor!r} in {store.target!r}")
            else:
                self._written.add(tensor)


def _form_problem(compute: Compute, original: Op, graph: Graph, *, has_halo: bool) -> str:
    """Return how an op differs from that of the graph in what no shard changes; "" if it does not.

    On a shard a number may be divided, an entry of a list may be smaller (or larger, as the pads of a transposed
    convolution that reads a halo), and the content of a constant another one. A function of domain `autopar` that is
    told where its block starts may be in the op's place.
    """
    op = compute.op
    if compute.start is None:
        if op.kind != original.kind:
            return f"op {op.name!r} is {op.kind}, and {original.kind} in the graph"
        if [name for name, _ in op.attrs] != [name for name, _ in original.attrs]:
            return f"op {op.name!r} has other attributes than in the graph"
        for (name, value), (_, whole) in zip(op.attrs, original.attrs, strict=True):
            if not _is_share(value, whole, has_halo=has_halo):
                return f"attribute {name!r} of op {op.name!r} is {value!r}, and {whole!r} in the graph"
    elif not op.kind.startswith(f"{DOMAIN}::") or op.kind not in FUNCTIONS:
        return f"op {op.name!r} is {op.kind}, which cannot be told where its block starts"
    for index, content in compute.constants:
        held = graph.constants.get(op.inputs[index]) if 0 <= index < len(op.inputs) else None
        if held is None or held.size != len(content):
            return f"input {index} of op {op.name!r} is no constant of {len(content)} numbers"
    return ""


def _is_share(value: Attr, whole: Attr, *, has_halo: bool) -> bool:
    """Whether a value of an attribute may be what a shard has of another one."""
    if value == whole and type(value) is type(whole):
        return True
    if isinstance(value, int) and isinstance(whole, int):
        return 0 < value < whole and whole % value == 0
    if not isinstance(value, tuple) or not isinstance(whole, tuple) or len(value) != len(whole):
        return False
    return all(
        isinstance(own, int) and isinstance(old, int) and own >= 0 and (own <= old or has_halo)
        for own, old in zip(value, whole, strict=True)
    )


def _phases(op: Op) -> tuple[SegmentPhase, ...]:
    """Return the phases of the segments that an op may be in."""
    phase = segment_phase(op.phase)
    return (phase, SegmentPhase.WEIGHT) if phase is SegmentPhase.BACKWARD else (phase,)

"""Writing the segments of one kind of block: what is gathered, run, exchanged and stored, instruction by instruction.

A value has one *home* placement (where its op defines it, or how it reaches the block). Before an op reads it at
another placement, the cheapest sequence of collectives is inserted, once per placement and phase. Gradients that are
reduced before they are summed over microbatches, and the reduction of the sums, run beside compute.

Ops are rewritten for one device (`local_op.py`), so that every instruction can be executed as it stands.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import fsum

import numpy as np

from autopar.cost import CostModel, Move, Resharder
from autopar.cost.reshard import Share
from autopar.errors import PlanError
from autopar.folding.block_interface import HandOver
from autopar.folding.fold import BlockKind, Folded
from autopar.folding.gather_units import NO_UNIT, UnitPart, gather_units
from autopar.folding.graph_facts import row_routings
from autopar.folding.shared_experts import shared_expert_ops
from autopar.folding.weight_gradients import weight_pass_ops
from autopar.ir.graph import Op, Phase, Role
from autopar.plan import BlockPlan, OpPlacement
from autopar.program.local_op import block_start, halo_exchange, local_op
from autopar.program.offload import MASTER, offload_saved, offload_state
from autopar.program.op_groups import NOTHING, Stated
from autopar.program.records import (
    Category,
    Collective,
    Compute,
    Instruction,
    Operand,
    Part,
    Segment,
    SegmentPhase,
    Slice,
    Store,
    defines,
    reads,
    segment_phase,
)
from autopar.program.rerun_ops import run_again
from autopar.sharding import (
    Mesh,
    Placements,
    Replicate,
    Shard,
    format_placements,
    local_shape,
    parse_placements,
)

HINT = "the plan belongs to another model or was edited: solve again"
"""Ends the name of a parameter as the optimizer reads it, where its update runs."""
_COPY_PHASE = {
    SegmentPhase.FORWARD: "forward",
    SegmentPhase.BACKWARD: "backward",
    SegmentPhase.WEIGHT: "backward",
    SegmentPhase.UPDATE: "update",
}


@dataclass(frozen=True, slots=True)
class LoweredKind:
    """A kind of block, lowered.

    Attributes:
        segments: Its segments.
        resident: Persistent bytes per device of one instance.
        owned: Bytes per device of the gradients and the optimizer's state of its parameters, by their name.
        borrowed: Bytes per device of the parameters of other blocks that it reads, by name.
        stored: Bytes per device of its parameters as they are stored, by name.
        sums: Owners of sums of gradients, by the name of the sum.
    """

    segments: list[Segment]
    resident: dict[Category, float]
    owned: Mapping[str, Mapping[Category, float]]
    borrowed: Mapping[str, float]
    stored: Mapping[str, float] = field(default_factory=dict)
    sums: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reshards:
    """Changes of placement: of what compute waits for one by one, and of what travels in buckets."""

    alone: Resharder
    bucketed: Resharder


@dataclass(slots=True)
class _Draft:
    """A segment being written: what is there under which placement."""

    phase: SegmentPhase
    instructions: list[Instruction] = field(default_factory=list)
    external: dict[str, Operand] = field(default_factory=dict)
    stores: list[Store] = field(default_factory=list)
    exports: list[Operand] = field(default_factory=list)
    parts: dict[str, Part] = field(default_factory=dict)
    forms: dict[tuple[str, Placements], Operand] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _States:
    """The persistent tensors of a graph by what they are.

    Attributes:
        whole: Values that the optimizer reads and writes whole: all that moments weigh, their share of the master copy
            included, and parameters as they are stored.
        roles: By output, of what is stored.
        inputs: By output, of what is stored.
        parameters: Inputs.
        moments: Inputs.
        owners: By output, the parameter that a gradient or a moment belongs to.
        sums: By input, the parameter that a sum of gradients belongs to.
    """

    whole: frozenset[str]
    roles: Mapping[str, Role]
    inputs: Mapping[str, str]
    parameters: frozenset[str]
    moments: frozenset[str]
    owners: Mapping[str, str]
    sums: Mapping[str, str]


@lru_cache(maxsize=16)
def _states(folded: Folded) -> _States:
    states = folded.graph.states
    return _States(
        whole=frozenset(
            name
            for state in states
            for name in (state.input, state.output)
            if state.role is Role.MOMENT or (state.role is Role.PARAMETER and name != state.input)
        ),
        roles={state.output: state.role for state in states if state.output != state.input},
        inputs={state.output: state.input for state in states},
        parameters=frozenset(state.input for state in states if state.role is Role.PARAMETER),
        moments=frozenset(state.input for state in states if state.role is Role.MOMENT),
        owners={state.output: state.owner for state in states},
        sums={state.input: state.owner for state in states if state.role is Role.GRADIENT},
    )


class BlockLowering:
    """Writes the segments of one kind of block."""

    def __init__(
        self,
        block: BlockPlan,
        folded: Folded,
        handed: HandOver,
        reshards: Reshards,
        costs: CostModel,
        sizes: tuple[Mapping[str, float], Mapping[str, float]],
        splits: bool,
        kernels: Stated = NOTHING,
    ) -> None:
        self.kernels = kernels
        self.handed, self.graph, self.folded = handed, folded.graph, folded
        self.kind: BlockKind = folded.kinds[block.kind]
        self.mesh: Mesh = reshards.alone.mesh
        self.reshards, self.costs = reshards, costs
        self.late = weight_pass_ops(folded, self.kind) if splits else frozenset()
        self.selective = frozenset(block.selective)
        self.resident, self.wire = sizes
        self.units = gather_units(folded, costs, self.mesh.shape)
        self.routings, self.shared = row_routings(folded), shared_expert_ops(folded)
        known = _states(folded.pattern)
        self.whole, self.roles, self.states, self.moments = known.whole, known.roles, known.inputs, known.moments
        self.owners, self.sums = known.owners, known.sums
        self.ops = {op.op: op for op in block.ops}
        self.homes: dict[str, Placements] = {}
        for item in (*block.states, *block.borrowed, *block.arrivals):
            self.homes[item.value] = parse_placements(item.placement)
        self.departures = {item.value: parse_placements(item.placement) for item in block.departures}
        self.copies = {item.value: parse_placements(item.placement) for item in block.copies}
        self.parameters = {item.value for item in block.states}
        self.borrowed = [item.value for item in block.borrowed]
        self._check_complete(known.parameters)
        for op in self.kind.ops:
            _check_form(op, self.ops[op.name])
            for name, text in zip(op.outputs, self.ops[op.name].outputs, strict=True):
                if name and text:
                    self.homes[name] = parse_placements(text)
        self._check_results()

    def _check_results(self) -> None:
        """Check that the plan places every result that the block reads again, keeps or hands over."""
        used = {name for op in self.kind.ops for name in op.inputs}
        used |= {*self.states, *self.departures, *self.graph.outputs}
        for op in self.kind.ops:
            for name in op.outputs:
                if name and name in used and name not in self.homes:
                    raise PlanError(f"the plan does not place {name!r}, a result of {op.name!r}", hint=HINT)

    def _check_complete(self, weights: frozenset[str]) -> None:
        """Check that the plan places every op, the `weights` it reads, and every value at the edges of the block."""
        read = {name for op in self.kind.ops for name in op.inputs}
        made = [name for op in self.kind.ops for name in op.outputs]
        owned = {self.states[name] for name in made if self.roles.get(name) is Role.PARAMETER}
        arriving = {*self.handed.forward_in, *self.handed.backward_in}.union(item.value for item in self.kind.arrivals)
        leaving = {*self.handed.forward_out, *self.handed.backward_out}.union(
            name for name in self.handed.far if name in made
        )
        unknown = self.selective - {op.name for op in self.kind.ops if segment_phase(op.phase) is SegmentPhase.FORWARD}
        if unknown:
            raise PlanError(f"the plan runs {min(unknown)!r} again, which is no forward op of its block", hint=HINT)
        for what, names, placed in (
            ("op", [op.name for op in self.kind.ops], self.ops),
            ("state", owned, self.parameters),
            ("parameter", weights & read, self.homes),
            ("arrival", arriving, self.homes),
            ("departure", leaving, self.departures),
        ):
            missing = sorted(name for name in names if name not in placed)
            if missing:
                raise PlanError(f"the plan says nothing about {what} {missing[0]!r}", hint=HINT)

    def run(self) -> LoweredKind:
        """Return the segments and the resident bytes of one instance."""
        groups: dict[SegmentPhase, list[Op]] = {phase: [] for phase in SegmentPhase}
        for op in self.kind.ops:
            groups[segment_phase(op.phase)].append(op)
        saved = self._saved(groups)
        backwards = groups[SegmentPhase.BACKWARD]
        groups[SegmentPhase.BACKWARD] = [op for op in backwards if op.name not in self.late]
        groups[SegmentPhase.WEIGHT] = [op for op in backwards if op.name in self.late]

        forward = _Draft(SegmentPhase.FORWARD)
        inputs = self._enter(forward, self.handed.forward_in)
        for op in groups[SegmentPhase.FORWARD]:
            self._emit(forward, op)
        self._export(forward)
        kept = tuple(self._home(forward, name) for name in saved)
        outputs = self._leave(forward, self.handed.forward_out)
        segments = [self._segment(forward, inputs, kept, outputs)]
        if backwards:
            again = run_again(segments[0], self.selective)
            if again is not None:
                segments.append(again)
            segments.extend(offload_saved(segments[0]) or ())
            backward = _Draft(SegmentPhase.BACKWARD)
            inputs = self._enter(backward, self.handed.backward_in)
            for operand, name in zip(kept, saved, strict=True):
                backward.forms[name, self.homes[name]] = operand
            for op in groups[SegmentPhase.BACKWARD]:
                self._emit(backward, op)
            self._export(backward)
            outputs = self._leave(backward, self.handed.backward_out)
            weight = self._weight(backward, groups[SegmentPhase.WEIGHT])
            held = _held(weight, backward, inputs) if weight is not None else ()
            segments.append(self._segment(backward, inputs, held, outputs))
            if weight is not None:
                segments.append(self._segment(weight, (), (), ()))
        if groups[SegmentPhase.UPDATE]:
            segments.extend(self._update(groups[SegmentPhase.UPDATE]))
        borrowed = {name: self._kept_bytes(name, self.homes[name]) for name in self.borrowed}
        owned: dict[str, dict[Category, float]] = {name: {} for name in sorted(self.parameters)}
        resident = self._resident(owned)
        caches = self._cached_bytes(segments[0])
        if caches:
            resident[Category.CACHES] = caches
        stored = {name: self._kept_bytes(name, self.homes[name]) for name in sorted(self.parameters)}
        return LoweredKind(segments, resident, owned, borrowed, stored, self.sums)

    def _weight(self, backward: _Draft, ops: list[Op]) -> _Draft | None:
        """Return the part of the backward that leads to gradients of parameters only, if there is any.

        It goes on from all that is there when the rest is done, at every placement it was brought to.
        """
        if not ops:
            return None
        weight = _Draft(SegmentPhase.WEIGHT, forms=dict(backward.forms))
        for op in ops:
            self._emit(weight, op)
        for value in _missing(weight):
            if value in backward.external:
                weight.external[value] = backward.external[value]
                if value in backward.parts:
                    weight.parts[value] = backward.parts[value]
        return weight

    def _update(self, ops: list[Op]) -> list[Segment]:
        """Return the segments that reduce the sums of gradients and run the optimizer."""
        reduce, update = _Draft(SegmentPhase.REDUCE), _Draft(SegmentPhase.UPDATE)
        for op in ops:
            for name, text in zip(op.inputs, self.ops[op.name].inputs, strict=True):
                if self.roles.get(name) is not Role.GRADIENT:
                    continue
                target = parse_placements(text)
                operand = self._read(reduce, name, target, overlaps=True)
                if operand.value == name:
                    self._declare(update, operand, self.states[name])
                else:
                    reduce.stores.append(Store(operand, operand.value))
                    update.external[operand.value] = operand
                update.forms[name, target] = operand
            self._emit(update, op)
            for name in op.outputs:
                if self.roles.get(name) is Role.PARAMETER:
                    owner = self.states[name]
                    assert owner in self.parameters, f"{op.name} updates {owner}, which another block owns"
                    self._store(update, self._read(update, name, self.homes[owner]), owner)
                elif self.roles.get(name) is Role.MOMENT:
                    self._store(update, self._home(update, name), self.states[name])
        segments = [self._segment(reduce, (), (), ()), self._segment(update, (), (), ())]
        return [*segments, *(offload_state(segments[1], self.moments) or ())]

    # Values.

    def _saved(self, groups: Mapping[SegmentPhase, list[Op]]) -> list[str]:
        """Return the forward values the backward reads, in order of first use."""
        forward = {name for op in groups[SegmentPhase.FORWARD] for name in op.outputs if name}
        forward.update(self.handed.forward_in)
        used = [name for op in groups[SegmentPhase.BACKWARD] for name in op.inputs if name in forward]
        return list(dict.fromkeys(used))

    def _operand(self, name: str, placements: Placements, label: str = "") -> Operand:
        shape = local_shape(self.graph.values[name].shape, placements, self.mesh)
        travels = name in self.roles or name in self.parameters
        is_kept = name in self.whole or label.endswith(MASTER) or not travels
        size = self.resident[name] if is_kept else self.wire[name]
        for dim in shape:
            size *= dim
        return Operand(label or name, shape, size, placements)

    def _enter(self, draft: _Draft, names: Sequence[str]) -> tuple[Operand, ...]:
        operands = []
        for name in names:
            operand = self._operand(name, self.homes[name])
            draft.forms[name, self.homes[name]] = operand
            draft.parts[operand.value] = Part(operand.value, name)
            operands.append(operand)
        return tuple(operands)

    def _leave(self, draft: _Draft, names: Sequence[str]) -> tuple[Operand, ...]:
        operands = tuple(self._read(draft, name, self.departures[name], shared=False) for name in names)
        for operand, name in zip(operands, names, strict=True):
            draft.parts[operand.value] = Part(operand.value, name)
        return operands

    def _export(self, draft: _Draft) -> None:
        """Export what this segment makes for blocks further away, and the results of the model."""
        made = {
            name
            for instruction in draft.instructions
            if isinstance(instruction, Compute)
            for name in instruction.op.outputs
        }
        leaving = [(name, self.departures[name]) for name in self.handed.far if name in made]
        leaving += [(name, self.homes[name]) for name in self.graph.outputs if name in made]
        for name, placements in leaving:
            operand = self._read(draft, name, placements, shared=False)
            draft.parts[operand.value] = Part(operand.value, name)
            if operand not in draft.exports:
                draft.exports.append(operand)

    def _declare(self, draft: _Draft, operand: Operand, tensor: str) -> Operand:
        """Note that a value is there anyway."""
        draft.external[operand.value] = operand
        draft.parts[operand.value] = Part(operand.value, tensor)
        return operand

    def _store(self, draft: _Draft, operand: Operand, tensor: str) -> None:
        """Note that a value is the new content of a persistent tensor."""
        draft.stores.append(Store(operand, tensor))
        draft.parts[operand.value] = Part(operand.value, tensor)

    def _home(self, draft: _Draft, name: str) -> Operand:
        """Return the value as its op defines it; what comes from outside the segment is declared external."""
        key = (name, self.homes[name])
        if key not in draft.forms:
            tensor = self.states[name] if self.roles.get(name) is Role.GRADIENT else name
            draft.forms[key] = self._declare(draft, self._operand(name, self.homes[name]), tensor)
        return draft.forms[key]

    def _read(
        self, draft: _Draft, name: str, target: Placements, *, overlaps: bool = False, shared: bool = True
    ) -> Operand:
        """Return the value at a placement, changing it first if need be."""
        if (name, target) in draft.forms:
            return draft.forms[name, target]
        if (
            name not in self.homes
        ):  # data, constants, buffers and the optimizer's own state are wherever they are needed
            operand = self._operand(name, target, f"{name}|{format_placements(target)}")
            draft.forms[name, target] = self._declare(draft, operand, name)
            return operand
        source, operand = self.homes[name], self._home(draft, name)
        if shared and draft.phase in _COPY_PHASE:
            copy = self.copies.get(f"{name}@{self.kind.id}/{_COPY_PHASE[draft.phase]}")
            if copy is not None and copy != target:
                source, operand = copy, self._read(draft, name, copy, shared=False)
        shape = self.graph.values[name].shape
        local_shape(shape, target, self.mesh)  # a plan may ask for what the value does not have
        chunks = _chunks(len(shape), source, target)
        path: list[tuple[Move, Placements]] = []
        current = list(source)
        bucketed = overlaps or draft.phase is SegmentPhase.UPDATE
        resharder = self.reshards.bucketed if bucketed else self.reshards.alone
        unit = self._unit(draft.phase, name)
        for move in self._moves(resharder, name, chunks, source, target, unit.share):
            current[move.axis] = move.target
            path.append((move, tuple(current)))
        # What other reads have reached is not moved again: the way starts at the last placement that is there.
        known = [index for index, (_, reached) in enumerate(path) if (name, reached) in draft.forms]
        if known:
            operand = draft.forms[name, path[known[-1]][1]]
            path = path[known[-1] + 1 :]
        for move, reached in path:
            result = self._operand(name, reached, f"{name}|{format_placements(reached)}|{draft.phase}")
            axis = self.mesh.axes[move.axis]
            if move.collective is None:
                assert isinstance(move.source, Replicate), move
                assert isinstance(move.target, Shard), move
                draft.instructions.append(Slice(axis, move.target, operand, result))
            else:
                ends = move.source, move.target, operand, result
                rest = move.nbytes, overlaps, move.routed, unit.unit
                draft.instructions.append(Collective(move.collective, axis, *ends, *rest))
            draft.forms[name, reached] = result
            operand = result
        return operand

    def _unit(self, phase: SegmentPhase, name: str) -> UnitPart:
        """Return with what a parameter is gathered in a pass; nothing for other values, and outside passes."""
        if phase not in (SegmentPhase.FORWARD, SegmentPhase.BACKWARD, SegmentPhase.WEIGHT):
            return NO_UNIT
        return self.units[self.kind.id, phase is not SegmentPhase.FORWARD].get(name, NO_UNIT)

    def _moves(
        self,
        resharder: Resharder,
        name: str,
        chunks: tuple[int, ...],
        source: Placements,
        target: Placements,
        share: Share,
    ) -> tuple[Move, ...]:
        """Return the changes of placement of a value; states of the optimizer may be dealt out along any dim."""
        dealt = frozenset(each.whole for each in (*source, *target) if isinstance(each, Shard) and each.whole)
        found = resharder.of(
            self.graph.values[name].shape, self.wire[name], chunks, self.routings.get(name), share, dealt
        )
        return found.path(source, target)

    # Instructions.

    def _emit(self, draft: _Draft, op: Op) -> None:
        placement = self.ops[op.name]
        local, constants = local_op(self.graph, op, placement)
        accumulates = any(self.roles.get(name) is Role.GRADIENT for name in op.outputs)
        inputs: list[Operand | None] = []
        for name, text in zip(op.inputs, placement.inputs, strict=True):
            if not name:
                inputs.append(None)
                continue
            target = parse_placements(text)
            if op.phase is Phase.UPDATE and name in self.parameters:
                # The optimizer updates its own copy, which lies where the update runs.
                operand = self._operand(name, target, f"{name}{MASTER}")
                inputs.append(self._declare(draft, operand, name))
            else:
                inputs.append(self._read(draft, name, target, overlaps=accumulates))
        start = block_start(op, placement, inputs, self.mesh)
        for rows in placement.halos:
            exchange = halo_exchange(op, rows, inputs, self.mesh)
            draft.instructions.append(exchange)
            inputs[rows.input] = exchange.result
        outputs: list[Operand | None] = []
        for name in op.outputs:
            if not name or name not in self.homes:
                outputs.append(None)
                continue
            operand = self._operand(name, self.homes[name])
            draft.forms[name, self.homes[name]] = operand
            outputs.append(operand)
            if self.roles.get(name) is Role.GRADIENT:
                self._store(draft, operand, self.states[name])
        kept = self._left_behind(op, inputs, outputs) if op.phase is not Phase.UPDATE else 0.0
        kernel, again = self.kernels.kernel.get(op.name, ""), self.kernels.again.get(op.name, ())
        shared = op.name in self.shared
        compute = Compute(local, tuple(inputs), tuple(outputs), constants, start, kept, kernel, again, shared)
        draft.instructions.append(compute)

    def _left_behind(self, op: Op, inputs: Sequence[Operand | None], outputs: Sequence[Operand | None]) -> float:
        """Return the bytes an op's kernel keeps for its gradient besides values."""
        read, made = (
            [None if operand is None else np.array([operand.shape], dtype=np.int64) for operand in operands]
            for operands in (inputs, outputs)
        )
        first = inputs[0] if inputs else None
        splits = first is not None and bool(first.shape) and self.graph.values[op.inputs[0]].shape[-1] > first.shape[-1]
        return float(self.costs.kept_bytes(op, read, made, self.resident, splits=splits)[0])

    def _segment(
        self, draft: _Draft, inputs: tuple[Operand, ...], saved: tuple[Operand, ...], outputs: tuple[Operand, ...]
    ) -> Segment:
        return Segment(
            self.kind.id,
            draft.phase,
            inputs,
            tuple(draft.external.values()),
            tuple(draft.instructions),
            saved,
            outputs,
            tuple(draft.stores),
            tuple(draft.exports),
            tuple(draft.parts.values()),
        )

    def _kept_bytes(self, name: str, placements: Placements) -> float:
        """Return the bytes per device of a persistent tensor at a placement."""
        elements = 1.0
        for dim in local_shape(self.graph.values[name].shape, placements, self.mesh):
            elements *= dim
        return elements * self.resident[name]

    def _cached_bytes(self, forward: Segment) -> float:
        """Return the bytes per device of the caches that one instance reads, those of all microbatches."""
        caches = {name for op in self.kind.ops for _, name in self.folded.caches_of(op)}
        tensors = {part.value: part.tensor for part in forward.parts}
        read = (operand.bytes for operand in forward.external if tensors.get(operand.value) in caches)
        return self.folded.microbatches * fsum(read) if caches else 0.0

    def _resident(self, owned: Mapping[str, dict[Category, float]]) -> dict[Category, float]:
        """Return the bytes of the persistent tensors of one instance, and add to what each parameter has of them."""
        totals: dict[Category, float] = {}

        def add(category: Category, amount: float, owner: str = "") -> None:
            for sizes in (totals, owned[owner]) if owner in owned else (totals,):
                sizes[category] = sizes.get(category, 0.0) + amount

        for name in sorted(self.parameters):
            add(Category.PARAMETERS, self._kept_bytes(name, self.homes[name]))
        for op in self.kind.ops:
            for name in op.outputs:
                role = self.roles.get(name)
                if role not in (Role.GRADIENT, Role.MOMENT):
                    continue
                size, owner = self._kept_bytes(name, self.homes[name]), self.owners[name]
                if role is Role.GRADIENT:
                    add(Category.GRADIENTS, size, owner)
                    continue
                passing = self.costs.policy.update_share(self.resident[name])
                add(Category.OPTIMIZER, size * (1 - passing), owner)
                if passing:
                    add(Category.UPDATE, size * passing, owner)
        return totals


def _missing(draft: _Draft) -> list[str]:
    """Return the values that a segment reads and neither makes nor declares, in order of first use."""
    made = {operand.value for instruction in draft.instructions for operand in defines(instruction)}
    read = (operand.value for instruction in draft.instructions for operand in reads(instruction))
    return [value for value in dict.fromkeys(read) if value not in made and value not in draft.external]


def _held(weight: _Draft, backward: _Draft, inputs: tuple[Operand, ...]) -> tuple[Operand, ...]:
    """Return what the weight segment reads of the backward segment's inputs and of what that makes."""
    made = {operand.value: operand for instruction in backward.instructions for operand in defines(instruction)}
    made |= {operand.value: operand for operand in inputs}
    return tuple(made[value] for value in _missing(weight) if value in made)


def _check_form(op: Op, placement: OpPlacement) -> None:
    """Check that a plan places each input and output of an op."""
    for what, names, placed in (("inputs", op.inputs, placement.inputs), ("outputs", op.outputs, placement.outputs)):
        if len(names) != len(placed):
            raise PlanError(
                f"the plan places {len(placed)} {what} of op {op.name!r}, which has {len(names)}",
                hint=HINT,
            )


def _chunks(rank: int, *placements: Placements) -> tuple[int, ...]:
    """Return in how many chunks each dim of a value is cut that lies at some placements."""
    chunks = [1] * rank
    for placement in (item for items in placements for item in items):
        if isinstance(placement, Shard):
            chunks[placement.dim] = placement.chunks
    return tuple(chunks)

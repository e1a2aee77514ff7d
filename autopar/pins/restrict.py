"""Pinned and forbidden placements as a restriction of the placement problem.

Tactics are applied as in `autopar partition`: what they decide, propagation included, is the only thing left there. An
axis that is named for a role does what the role asks wherever an op or a value can; where none of its strategies does,
it is free.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

import numpy as np
from numpy.typing import NDArray

from autopar.degrees import SHARD
from autopar.describe.context_kinds import kind_of, limits_of
from autopar.discover import Rules, Strategy
from autopar.errors import PinError, TacticError
from autopar.folding.expert_parameters import experts_of
from autopar.folding.fold import Folded
from autopar.formulate.manual_recipes import DataParallelism, GraphFacts, Placed, Tensor, matching_strategies
from autopar.formulate.op_strategies import encode
from autopar.formulate.tables import Decision
from autopar.ir.graph import Op, Phase, Value
from autopar.ir.rings import RINGS
from autopar.pins.records import AXIS_NAMES, Pins
from autopar.sharding import Mesh
from autopar.tactics import Replicate, Shard, Tactic
from autopar.tactics.apply import Applier
from autopar.tactics.automatic import Undecided
from autopar.tactics.state import State, Topology

Mask = NDArray[np.bool_]

SEQUENCE_RANK = 3
"""Rank of activations that have samples, positions and channels."""


@dataclass(frozen=True, slots=True, eq=False)
class PlacementPins:
    """Restricts the placements of a graph on a mesh to what pins leave.

    Attributes:
        pins: The pins.
        batch: Returns the batch dim of every value of a folded graph that has one.
    """

    pins: Pins
    batch: Callable[[Folded], Mapping[str, int]]

    def __call__(self, folded: Folded, rules: Rules, mesh: Mesh) -> "Pinned | None":
        """Return the restriction; None if the mesh cannot do what is pinned."""
        try:
            return self.restriction(folded, rules, mesh)
        except TacticError:
            return None

    def restriction(self, folded: Folded, rules: Rules, mesh: Mesh) -> "Pinned":
        """Return the restriction.

        Raises:
            TacticError: If the mesh cannot do what is pinned.
        """
        pin, batch = self.pins.pin, self.batch(folded)
        named = {role for role in AXIS_NAMES for axis in mesh.axes if axis.name == role}
        along = self.pins.sequence_parallel
        split = None if len(along) > 1 else True in along
        found = Pinned(folded, mesh, GraphFacts.of(folded, batch), frozenset(named), self.pins.roles, split)
        if self.pins.limits_context:
            found.pins = self.pins
        if pin.tactics:
            found.undecided = applied(pin.tactics, folded, rules, mesh, batch)
        for tactic in self.pins.forbid.tactics:
            found.forbid(tactic, Applier(State(Topology(folded, rules, mesh)), batch))
        return found


def applied(tactics: Sequence[Tactic], folded: Folded, rules: Rules, mesh: Mesh, batch: Mapping[str, int]) -> Undecided:
    """Return what tactics leave undecided.

    Raises:
        TacticError: If the mesh cannot do what they say.
    """
    state = State(Topology(folded, rules, mesh))
    applier = Applier(state, batch)
    for number, tactic in enumerate(tactics):
        outcome = applier.apply(tactic, number)  # type: ignore[arg-type]  # files keep the others apart
        if outcome.refused and isinstance(tactic, Shard | Replicate):  # the others do what they can
            raise TacticError(str(outcome.refused[0]), hint="pin another dim, or another mesh")
    return Undecided(state, frozenset(range(len(mesh.axes))))


def check_tactics(pins: Pins, folded: Folded, rules: Rules, meshes: Sequence[Mesh], batch: Mapping[str, int]) -> None:
    """Raise an error if tactics speak of values or axes that are not there, or no mesh can do what they say.

    Raises:
        PinError: With the nearest name.
    """
    names = {state.input for state in folded.graph.states} | set(folded.graph.inputs) | set(folded.by_value)
    for section, choices in (("pin", pins.pin), ("forbid", pins.forbid)):
        failed: TacticError | None = None
        for mesh in meshes if choices.tactics else ():
            try:
                PlacementPins(Pins(**{section: choices}), lambda _: batch).restriction(folded, rules, mesh)
                break
            except TacticError as error:
                failed = failed or error
        else:
            if failed is not None:
                raise PinError(f"{section} tactics: {failed.args[0]}", hint=_near(failed, choices.tactics, names))


def _near(error: TacticError, tactics: Sequence[Tactic], names: set[str]) -> str:
    """Return the hint of an error; the nearest name if it is about a pattern that matches nothing."""
    for tactic in tactics:
        patterns = list(tactic.inputs) if isinstance(tactic, Shard) else [getattr(tactic, "pattern", None)]
        for pattern in patterns:
            if isinstance(pattern, str) and f"{pattern!r}" in error.args[0] and "no value is called" in error.args[0]:
                close = get_close_matches(pattern, names, n=1, cutoff=0.3)
                return f"the nearest name is {close[0]}" if close else error.hint
    return error.hint


@dataclass(slots=True, eq=False)
class Pinned:
    """What is left of the placements of one graph on one mesh.

    Attributes:
        folded: The graph.
        mesh: The devices of a stage.
        facts: What roles need to know of the graph.
        named: Roles that axes are named for.
        counted: Roles of whose degree something is said: axes that are not named for them do nothing of the kind.
        along: Whether values between blocks are split along the sequence, as of `Choices`; None if that is open.
        undecided: What pinned tactics leave.
        forbidden: Digits of placements that an axis must not have, by value and axis.
        followed: Whether every decision met so far has something left.
        pins: What says which kinds of context parallelism are left; None if nothing does.
    """

    folded: Folded
    mesh: Mesh
    facts: GraphFacts
    named: frozenset[str]
    counted: frozenset[str]
    along: bool | None = None
    undecided: Undecided | None = None
    forbidden: dict[tuple[str, int], set[int]] = field(default_factory=dict)
    followed: bool = True
    pins: Pins | None = None
    _names: dict[str, str] = field(default_factory=dict)

    def forbid(self, tactic: Tactic, applier: Applier) -> None:
        """Forbid what a tactic would do to the values it names."""
        self._names = {name: applier.topology.of(name) for name in applier.representatives.values()}
        match tactic:
            case Shard(inputs, axis):
                for pattern, dim in inputs.items():
                    for name in applier.matches(pattern):
                        own = dim % applier.topology.rank(name)
                        self._forbid(applier, name, applier.axis(axis), 2 + own)
            case Replicate(pattern, axis):
                axes = range(len(self.mesh.axes)) if axis is None else [applier.axis(axis)]
                for name in applier.matches(pattern):
                    for index in axes:
                        self._forbid(applier, name, index, 0)

    def _forbid(self, applier: Applier, name: str, axis: int, digit: int) -> None:
        self.forbidden.setdefault((applier.topology.of(name), axis), set()).add(digit)

    def of_op(self, kind: int, op: Op, strategies: Sequence[Strategy]) -> tuple[Mask, ...]:
        """Return by axis which strategies an op may take."""
        decided = self.undecided.of_op(kind, op, strategies) if self.undecided is not None else None
        placed: list[tuple[str, NDArray[np.int64], bool]] = []
        for names, is_output in ((op.inputs, False), (op.outputs, True)):
            for slot, name in enumerate(names):
                if name and name not in self.folded.free:
                    sides = (strategy.outputs if is_output else strategy.inputs for strategy in strategies)
                    codes = np.array([encode(side[slot]) for side in sides], dtype=np.int64)
                    placed.append((name, codes, is_output))
        masks = []
        for axis in range(len(self.mesh.axes)):
            mask = np.ones(len(strategies), dtype=bool) if decided is None else decided[axis]
            for name, codes, _ in placed:
                mask = mask & self._not_forbidden(name, axis, codes)
            wish = self._in_context(self.mesh.axes[axis].name, op, strategies)
            mask = mask & wish if (mask & wish).any() else mask
            masks.append(self._with_role(mask, axis, Decision.OP, kind, op, placed))
        return tuple(masks)

    def _in_context(self, axis: str, op: Op, strategies: Sequence[Strategy]) -> Mask:
        """Return which strategies of attention are of a kind of context parallelism that is left.

        Heads are split by tensor parallelism, too: they are an exchange of heads on an axis named `cp` only.
        """
        mask = np.ones(len(strategies), dtype=bool)
        if self.pins is None or "Attention" not in op.kind:
            return mask
        left, rank = self.pins.contexts(limits_of(op)), self._rank(op.inputs[0])
        for index, strategy in enumerate(strategies):
            in_ring = strategy.local is not None and strategy.local.kind in RINGS
            kind = kind_of(strategy.inputs[0], rank, in_ring=in_ring)
            mask[index] = kind is None or kind in left or (kind == "ulysses" and axis != "cp")
        return mask

    def of_value(self, decision: Decision, kind: int, value: Value) -> tuple[Mask, ...]:
        """Return by axis which placements a value may have."""
        decided = self.undecided.of_value(decision, kind, value) if self.undecided is not None else None
        codes = np.arange(len(value.shape) + 2, dtype=np.int64)
        masks = []
        for axis in range(len(self.mesh.axes)):
            mask = np.ones(len(codes), dtype=bool) if decided is None else decided[axis]
            if decision is not Decision.COPY:
                mask = mask & self._not_forbidden(value.name, axis, codes)
            masks.append(self._with_role(mask, axis, decision, kind, None, [(value.name, codes, True)]))
        return tuple(masks)

    def _not_forbidden(self, name: str, axis: int, codes: NDArray[np.int64]) -> Mask:
        digits = self.forbidden.get((self._names.get(name, name), axis), ())
        mask = np.ones(len(codes), dtype=bool)
        for digit in digits:
            mask &= codes != digit
        return mask

    def _with_role(self, mask: Mask, axis: int, decision: Decision, kind: int, op: Op | None, placed: Placed) -> Mask:
        """Return a mask narrowed to the role of an axis, where there is anything that narrow."""
        self.followed &= bool(mask.any())
        name = self.mesh.axes[axis].name
        wishes = [self._does(name, decision, kind, op, placed)] if name in self.named else []
        if name == "ep" and not self.counted:  # where degrees are pinned, other axes are free to split the batch
            inside = self._is_inside_experts(placed)
            wishes.append(self._has_own_experts(placed) if inside else self._splits_batch(decision, kind, op, placed))
        if "cp" in self.named and not self.counted and op is not None and name in ("dp", SHARD, "cp"):
            wishes.append(self._groups_experts(name, op, placed))
        wishes += [self._does_not(role, op, placed) for role in sorted(self.counted) if role != name and placed]
        if self.along is False and name != "cp" and decision is Decision.BOUNDARY:
            wishes.append(self._whole_sequence(placed))
        for wish in wishes:
            if (mask & wish).any():
                mask = mask & wish
        return mask

    def _does(self, role: str, decision: Decision, kind: int, op: Op | None, placed: Placed) -> Mask:
        """Return what of a decision does what a role asks."""
        match role:
            case "dp" | "shard":
                return self._splits_batch(decision, kind, op, placed)
            case "tp":
                return matching_strategies(self.facts, Tensor(sequence=self.along), decision, kind, op, placed)
            case "cp":
                return self._splits_sequence(decision, placed)
            case _:
                return self._splits_experts(op, placed)

    def _splits_batch(self, decision: Decision, kind: int, op: Op | None, placed: Placed) -> Mask:
        return matching_strategies(self.facts, DataParallelism(zero=None), decision, kind, op, placed)

    def _splits_sequence(self, decision: Decision, placed: Placed) -> Mask:
        mask = np.ones(len(placed[0][1]) if placed else 1, dtype=bool)
        for name, digits, _ in placed:
            dim = self.facts.batch.get(name)
            if dim is not None:
                mask &= digits != 2 + dim
                if decision is Decision.BOUNDARY:
                    mask &= digits == 3 + dim
            elif name in self.facts.parameters and decision is Decision.OP and name not in experts_of(self.folded):
                mask &= digits == 0
        return mask

    def _groups_experts(self, axis: str, op: Op, placed: Placed) -> Mask:
        """Return what keeps groups of experts neighbours beside context parallelism, as frameworks have them.

        Its devices have different experts if those of an axis named `ep` have; data-parallel devices outside do not.
        """
        mask = np.ones(len(placed[0][1]) if placed else 1, dtype=bool)
        if op.phase is not Phase.FORWARD:
            return mask
        for name, digits, is_output in placed:
            if not is_output and name in experts_of(self.folded):
                if axis != "cp":
                    mask &= digits != 2
                else:
                    mask &= (digits == 2) if "ep" in self.named else (digits == 0) | (digits == 2)
        return mask

    def _whole_sequence(self, placed: Placed) -> Mask:
        mask = np.ones(len(placed[0][1]), dtype=bool)
        for name, digits, _ in placed:
            dim = self.facts.batch.get(name)
            if dim is not None:
                mask &= digits != 3 + dim
        return mask

    def _splits_experts(self, op: Op | None, placed: Placed) -> Mask:
        mask = np.ones(len(placed[0][1]) if placed else 1, dtype=bool)
        if op is not None and op.phase is Phase.FORWARD:
            for name, digits, is_output in placed:
                if not is_output and name in experts_of(self.folded):
                    mask &= digits == 2
        return mask

    def _is_by_expert(self, name: str) -> bool:
        """Whether a value has rows for each expert: its dims begin with experts, then samples."""
        numbers = {self.folded.graph.values[own].shape[0] for own in experts_of(self.folded)}
        return self.facts.batch.get(name) == 1 and self.folded.graph.values[name].shape[0] in numbers

    def _is_inside_experts(self, placed: Placed) -> bool:
        """Whether all tensors of a decision that have samples have them by expert, as between dispatch and combine.

        Whether their rows lie by expert or by sample is then open: tokens travel to experts and back in between.
        """
        batched = [name for name, *_ in placed if name in self.facts.batch]
        return bool(batched) and all(map(self._is_by_expert, batched))

    def _has_own_experts(self, placed: Placed) -> Mask:
        """Return what multiplies by matrices of a device's own experts, in forward and backward alike."""
        mask = np.ones(len(placed[0][1]), dtype=bool)
        for name, digits, _ in placed:
            if name in experts_of(self.folded):
                mask &= digits == 2
        return mask

    def _does_not(self, role: str, op: Op | None, placed: Placed) -> Mask:
        """Return what of a decision does nothing of what a role is about."""
        mask = np.ones(len(placed[0][1]), dtype=bool)
        forward = op is not None and op.phase is Phase.FORWARD
        matrix = forward and any(self._rank(name) > 1 for name, *_ in placed if name in self.facts.parameters)
        for name, digits, is_output in placed:
            dim = self.facts.batch.get(name)
            used = forward and not is_output and name in self.facts.parameters
            match role:
                case "dp" if dim is not None:
                    mask &= digits != 2 + dim
                case "cp" if dim is not None and matrix and self._rank(name) == SEQUENCE_RANK:
                    # Norms and what lies between blocks may be split so: that is Megatron's sequence parallelism.
                    mask &= digits != 3 + dim
                case "tp" if used and self._rank(name) == 2:
                    mask &= digits == 0
                case "ep" if used and name in experts_of(self.folded):
                    mask &= digits != 2
        return mask

    def _rank(self, name: str) -> int:
        return len(self.folded.graph.values[name].shape)

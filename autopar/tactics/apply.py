"""What each tactic decides: the classes it splits or pins, found from the structure of the graph."""

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import assert_never

from autopar.context_parallelism import CONTEXT_KINDS
from autopar.discover import Strategy
from autopar.errors import TacticError
from autopar.folding.expert_parameters import experts_of
from autopar.folding.graph_facts import layer_kinds
from autopar.ir.graph import Op, Phase, Role, Value
from autopar.sharding import Placement, Placements, parse_placements
from autopar.tactics.key_heads import copy_key_heads
from autopar.tactics.propagate import Conflict, propagate
from autopar.tactics.records import (
    ContextParallel,
    DataParallel,
    ExpertParallel,
    Megatron,
    Pattern,
    Place,
    Replicate,
    SequenceParallel,
    Shard,
    ZeRO,
)
from autopar.tactics.state import PINNED, OpKey, State, is_partial, sharded_dim

Splitting = (
    Shard | Replicate | Place | DataParallel | Megatron | SequenceParallel | ContextParallel | ExpertParallel | ZeRO
)
"""Tactics that decide where values lie."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A value that a tactic asked for and could not have as it asked.

    Attributes:
        value: Its name.
        axis: Name of the mesh axis.
        dim: The dim, or `PINNED` if it was to stay whole.
        reason: Why.
    """

    value: str
    axis: str
    dim: int
    reason: str

    def __str__(self) -> str:
        wanted = "whole" if self.dim == PINNED else f"along dim {self.dim}"
        return f"{self.value}, {wanted} over {self.axis}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a tactic.

    Attributes:
        conflicts: Decisions that did not go together in an op.
        refused: What it asked for and could not have.
    """

    conflicts: tuple[Conflict, ...]
    refused: tuple[Refused, ...]


_CLASSED = frozenset({"Gather", "autopar::HeadStats", "MatMul", "Gemm", "Einsum", "Transpose"})
"""Ops that read a table of classes: look-ups, and products with it."""

_PRODUCTS = frozenset({"MatMul", "Gemm", "Einsum", "autopar::GroupedMatMul"})
"""Ops of which two make a pair for tensor parallelism."""

_GROUPED = frozenset(f"autopar::GroupedMatMul{gradient}" for gradient in ("", "Grad", "WeightGrad"))
"""Products of experts."""
_ROWS_END = "autopar::ExpertRows"
_ROWS: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    _ROWS_END: ((0,), (0,)),
    "autopar::ExpertDispatch": ((), (0,)),
    "autopar::ExpertSum": ((0,), ()),
    "autopar::ExpertCombine": ((0,), ()),
    "autopar::ExpertCombineGrad": ((0,), (0,)),
}
"""Ops around experts, and which of their inputs and outputs are rows of experts."""
_BY_HEADS = 4
"""Rank of operands of attention that have a dim for heads, (batch, heads, positions, channels)."""
_SAMPLES, _POSITIONS = 1, 2
"""Dims of rows of experts."""


class Applier:
    """Applies tactics to a state.

    Attributes:
        state: What has been decided.
        batch: The batch dim of every value that has one.
        representatives: For every value of the graph the one that stands for it and its equals.
    """

    def __init__(self, state: State, batch: Mapping[str, int]) -> None:
        self.state, self.batch = state, batch
        self.topology = state.topology
        self.graph = self.topology.folded.graph
        self._axes = {axis.name: index for index, axis in enumerate(self.topology.mesh.axes)}
        self.representatives = self._find_representatives()

    def of(self, state: State) -> "Applier":
        """Return the same for another state of the same graph."""
        other = copy(self)
        other.state = state
        return other

    def apply(self, tactic: Splitting, number: int) -> Outcome:
        """Apply a tactic and return what became of it.

        Args:
            tactic: What to do.
            number: How many tactics came before it.

        Raises:
            TacticError: If it speaks of an axis or a value that is not there, or splits nothing.
        """
        self._conflicts: list[Conflict] = []
        self._refused: list[Refused] = []
        match tactic:
            case Shard(inputs, axis):
                self._shard(inputs, self.axis(axis), number)
            case Replicate(pattern, axis):
                self._pin(pattern, range(len(self._axes)) if axis is None else [self.axis(axis)], number)
            case Place():
                self._place(tactic, number)
            case DataParallel(axis):
                self._shard_data(self._batches(), self.axis(axis), number, "batch")
            case ContextParallel():
                self._context_parallel(tactic, self.axis(tactic.axis), number)
            case Megatron(axis, vocabulary):
                self._megatron(self.axis(axis), number, vocabulary=vocabulary)
            case SequenceParallel(axis):
                self._sequence(self.axis(axis), number)
            case ExpertParallel(axis, batch):
                self._expert_parallel(self.axis(axis), number, batch=batch)
            case ZeRO():
                self._zero(tactic, self.axis(tactic.axis), number)
            case _:
                assert_never(tactic)
        return Outcome(tuple(self._conflicts), tuple(self._refused))

    def axis(self, name: str) -> int:
        """Return the index of a mesh axis.

        Raises:
            TacticError: If there is none of that name.
        """
        if name not in self._axes:
            raise TacticError(f"there is no mesh axis {name!r}", hint=f"axes are {', '.join(self._axes)}")
        return self._axes[name]

    def matches(self, pattern: Pattern) -> list[str]:
        """Return the values a pattern speaks of, by the names of the representatives.

        Raises:
            TacticError: If there is none, or only some of several equal blocks are spoken of.
        """
        values = self.graph.values
        if callable(pattern):
            found = [name for name in self.representatives if pattern(values[name])]
        else:
            found = [name for name in self.representatives if name == pattern or fnmatchcase(name, pattern)]
        if not found:
            raise TacticError(
                f"no value is called {pattern!r}" if isinstance(pattern, str) else "no value satisfies the predicate",
                hint="`autopar rules MODEL` lists ops and values; * stands for any letters",
            )
        spoken = dict.fromkeys(self.representatives[name] for name in found)
        every = set(found)
        for name, representative in self.representatives.items():
            if representative in spoken and name not in every:
                raise TacticError(
                    f"{pattern!r} speaks of {found[0]!r}, but not of {name!r} of an equal block",
                    hint="equal blocks are split alike: widen the pattern",
                )
        return list(spoken)

    def _find_representatives(self) -> dict[str, str]:
        """Return for every value of the graph the one that stands for it in the folded graph."""
        folded, graph = self.topology.folded, self.graph
        names = {parameter.producer: parameter.value.name for parameter in folded.parameters}
        found: dict[str, str] = {name: name for name in graph.inputs}
        for name, producer in folded.by_value.items():
            own = names.get(producer)
            if own is None:
                own = folded.kinds[producer.kind].ops[producer.position].outputs[producer.slot]
            found[name] = own
        by_owner = {(state.owner, state.role, _suffix(state.input, state.owner)): state.input for state in graph.states}
        for state in graph.states:
            owner = found.get(state.owner)
            if state.role in (Role.GRADIENT, Role.MOMENT) and owner is not None:
                key = (owner, state.role, _suffix(state.input, state.owner))
                found[state.input] = by_owner.get(key, state.input)
        return found

    # What tactics split.

    def _shard(self, inputs: Mapping[Pattern, int], axis: int, number: int) -> None:
        wanted = []
        for pattern, dim in inputs.items():
            names = self.matches(pattern)
            for name in names:
                rank = self.topology.rank(name)
                if not -rank <= dim < rank:
                    raise TacticError(f"{name!r} has no dim {dim}: it has {rank}", hint="dims count from 0")
            wanted += [(name, dim % self.topology.rank(name)) for name in names]
        if wanted and not any(self._is_possible(name, dim, axis) for name, dim in wanted):
            raise TacticError(self._indivisible(*wanted[0], axis), hint="choose another dim, or another mesh")
        self._shard_all(wanted, axis, number)

    def _is_possible(self, name: str, dim: int, axis: int) -> bool:
        return self.state.split(name, axis) is not None or self.state.divides(name, dim, axis)

    def _indivisible(self, name: str, dim: int, axis: int) -> str:
        shape, own = self.graph.values[name].shape, self.topology.mesh.axes[axis]
        others = [
            self.topology.mesh.axes[other].name
            for other, decided in self.state.splits.get(self.topology.of(name), {}).items()
            if other != axis and decided.dim == dim
        ]
        more = f", which {' and '.join(others)} split already," if others else ""
        return f"dim {dim} of {name!r} {shape}{more} cannot be divided over {own.name} of {own.size}"

    def _shard_all(self, wanted: Iterable[tuple[str, int]], axis: int, number: int) -> None:
        changed = []
        for name, dim in wanted:
            if self.state.decide(name, axis, dim, number):
                changed.append(name)
            else:
                self._refuse(name, axis, dim)
        self._conflicts += propagate(self.state, axis, changed, number)

    def _refuse(self, name: str, axis: int, dim: int) -> None:
        """Note what could not be had, unless it was so before."""
        before = self.state.split(name, axis)
        if before is None:
            reason = "it cannot be divided"
        elif before.dim == dim:
            return
        elif before.dim == PINNED:
            reason = f"tactic {before.tactic + 1} pinned it"
        else:
            reason = f"tactic {before.tactic + 1} split it along dim {before.dim}"
        self._refused.append(Refused(name, self.topology.mesh.axes[axis].name, dim, reason))

    def _pin(self, pattern: Pattern, axes: Iterable[int], number: int) -> None:
        names = self.matches(pattern)
        for axis in axes:
            for name in names:
                if not self.state.decide(name, axis, PINNED, number):
                    before = self.state.split(name, axis)
                    assert before is not None
                    if before.dim != PINNED:
                        self._refuse(name, axis, PINNED)

    def _place(self, tactic: Place, number: int) -> None:
        state, topology, mesh = self.state, self.topology, self.topology.mesh
        keys = {op.name: key for key, op in topology.ops.items()}
        numbers: dict[OpKey, list[int]] = {}
        for name, text in tactic.ops.items():
            if name not in keys:
                raise TacticError(
                    f"there is no op {name!r} in a representative block", hint="name ops as plan.json does"
                )
            options = {str(strategy): number for number, strategy in enumerate(topology.strategies(keys[name]))}
            parts = text.split(" | ")
            if len(parts) != len(mesh.axes) or any(part not in options for part in parts):
                raise TacticError(
                    f"{name!r} cannot run as {text!r} on {mesh}",
                    hint=f"on each axis it is one of {'; '.join(options)}",
                )
            numbers[keys[name]] = [options[part] for part in parts]
        placed = {name: self._parsed(name, name, text) for name, text in tactic.values.items()}
        copies = {name: self._parsed(name, name.rpartition("@")[0], text) for name, text in tactic.copies.items()}
        for key, found in numbers.items():
            for axis, option in enumerate(found):
                state.chosen.setdefault(key, {}).setdefault(axis, option)
        for name, placements in placed.items():
            state.placed.setdefault(topology.of(name), placements)
            for axis, placement in enumerate(placements):
                dim = sharded_dim(placement)
                state.decide(name, axis, PINNED if dim is None else dim, number)
        state.copies = copies if state.copies is None else {**copies, **state.copies}

    def _parsed(self, name: str, value: str, text: str) -> Placements:
        """Return placements of a value, which `name` stands for."""
        if value not in self.graph.values:
            raise TacticError(f"there is no value {name!r}", hint="name values as plan.json does")
        try:
            placements = parse_placements(text)
        except ValueError:
            raise TacticError(f"{name!r} at {text!r}", hint="write one placement per axis, such as S(0)R") from None
        if len(placements) != len(self.topology.mesh.axes):
            raise TacticError(f"{name!r} at {text!r} on {self.topology.mesh}", hint="write one placement per axis")
        return placements

    def _shard_data(self, wanted: list[tuple[str, int]], axis: int, number: int, what: str) -> None:
        self._check_named(wanted, what)
        self._check_data(wanted, axis, what)
        self._shard_all(wanted, axis, number)

    def _check_named(self, wanted: list[tuple[str, int]], what: str) -> None:
        if not wanted:
            raise TacticError(f"no input of the model has a {what} dim", hint="name the inputs with Shard")

    def _check_data(self, wanted: list[tuple[str, int]], axis: int, what: str) -> None:
        for name, dim in wanted:
            if not self._is_possible(name, dim, axis):
                raise TacticError(
                    f"{self._indivisible(name, dim, axis)}: it is the {what} of a microbatch",
                    hint="choose another mesh, a larger batch or fewer microbatches",
                )

    def _batches(self) -> list[tuple[str, int]]:
        """Return the data inputs that have a batch, with its dim."""
        return [(name, self.batch[name]) for name in self.graph.inputs if name in self.batch]

    def _sequences(self) -> list[tuple[str, int]]:
        """Return the data inputs that have a sequence, with its dim: tokens, or rows of features, after the batch."""
        found = []
        for name, dim in self._batches():
            value = self.graph.values[name]
            if len(value.shape) == dim + (3 if value.is_float else 2):
                found.append((name, dim + 1))
        return found

    def _context_parallel(self, tactic: ContextParallel, axis: int, number: int) -> None:
        """Split the sequence; what attention does on the axis is settled first where heads are split in its place."""
        if tactic.kind not in CONTEXT_KINDS:
            raise TacticError(f"context parallelism {tactic.kind!r}", hint=f"choose {', '.join(CONTEXT_KINDS)}")
        wanted = self._sequences()
        self._check_named(wanted, "sequence")
        self._check_data(wanted, axis, "sequence")
        if tactic.kind == "ulysses":
            for key, strategy in self._attention_by_heads(axis).items():
                self.state.chosen.setdefault(key, {})[axis] = strategy
        self.state.context[axis] = tactic.kind
        self._shard_all(wanted, axis, number)

    def _attention_by_heads(self, axis: int) -> dict[OpKey, int]:
        """Return for every attention op, and its gradient, the strategy that splits all its heads."""
        topology, found = self.topology, dict[OpKey, int]()
        for key, op in topology.ops.items():
            chosen = self.state.chosen.get(key, {})
            if "Attention" not in op.kind or axis in chosen:
                continue
            dim = 1 if topology.rank(op.inputs[0]) == _BY_HEADS else 2
            numbers = [
                int(number)
                for number in topology.possible(key, chosen, axis)
                if _splits_heads(topology.strategies(key)[number], dim)
            ]
            if not numbers:
                name = topology.mesh.axes[axis].name
                raise TacticError(
                    f"{name} does not divide the heads of {op.name!r}",
                    hint="choose the kind ring or gather, or an axis that divides query heads and key heads",
                )
            found[key] = numbers[0]
        return found

    def _expert_parallel(self, axis: int, number: int, *, batch: bool) -> None:
        """Give every device its experts; what they read and make is exchanged where samples or positions meet them.

        The products of experts and the ends of their rows are settled first, then the batch propagates up to them from
        both sides, then what lies between them follows the experts.
        """
        experts = self._experts()
        data = self._batches() if batch else []
        self._check_data(data, axis, "batch")
        owned = [
            state.input
            for state in self.graph.states
            if state.role in (Role.GRADIENT, Role.MOMENT) and state.owner in experts
        ]
        changed = [name for name in (*experts, *owned) if self._decided(name, axis, 0, number)]
        fixed = [key for name in changed for key in self._settle(name, axis, _keeps_apart)]
        changed += self._settle_rows(axis, number, _SAMPLES if batch else _POSITIONS)
        self._shard_all(data, axis, number)
        for key in fixed:
            op, strategy = self.topology.ops[key], self.state.strategy(key, axis)
            assert strategy is not None
            tensors = zip((*op.outputs, *op.inputs), (*strategy.outputs, *strategy.inputs), strict=True)
            for name, placement in tensors:
                dim = sharded_dim(placement)
                if name and dim is not None and self.topology.is_placed(op, name):
                    changed += [name] if self.state.decide(name, axis, dim, number) else []
        self._conflicts += propagate(self.state, axis, changed, number)

    def _settle_rows(self, axis: int, number: int, outside: int) -> list[str]:
        """Place rows of experts where they arrive at the experts, and where they are back; return these values.

        Args:
            axis: Index of the mesh axis, which splits the experts.
            number: How many tactics came before.
            outside: Dim of the rows that it splits outside the experts. Where that is the positions, dispatch and
                combination are settled, too: tensor parallelism splits the positions nowhere else.
        """
        topology, changed = self.topology, list[str]()
        for key, op in topology.ops.items():
            if op.kind not in _ROWS or axis in self.state.chosen.get(key, {}):
                continue
            is_end = op.kind == _ROWS_END
            if not is_end and outside != _POSITIONS:
                continue
            readers = [topology.ops[reader].kind for reader, _ in topology.readers.get(topology.of(op.outputs[0]), ())]
            dim = 0 if is_end and any(kind in _GROUPED for kind in readers) else outside
            for option in topology.possible(key, self.state.chosen.get(key, {}), axis):
                if _splits_rows(op, topology.strategies(key)[option], dim):
                    self.state.chosen.setdefault(key, {})[axis] = int(option)
                    if is_end and self.state.decide(op.outputs[0], axis, dim, number):
                        changed.append(op.outputs[0])
                    break
        return changed

    def _decided(self, name: str, axis: int, dim: int, number: int) -> bool:
        """Split a value and return whether that was possible; note it if not."""
        done = self.state.decide(name, axis, dim, number)
        if not done:
            self._refuse(name, axis, dim)
        return done

    def _settle(self, name: str, axis: int, wanted: Callable[[Strategy, Placement], bool]) -> list[OpKey]:
        """Choose the first strategy wanted for the ops that read a parameter or make its gradient; return these ops.

        Args:
            name: The parameter, or the sum of its gradients.
            axis: Index of the mesh axis.
            wanted: Whether a strategy will do; told how it places the value.
        """
        topology, found = self.topology, []
        places = [(key, slot, False) for key, slot in topology.readers.get(topology.of(name), ())]
        for key, _ in topology.makers.get(topology.of(name), ()):  # the sum over microbatches: what it adds is made by
            for term in topology.ops[key].inputs:
                places += [(maker, slot, True) for maker, slot in topology.makers.get(topology.of(term), ())]
        for key, slot, is_output in places:
            op = topology.ops[key]
            if op.phase is Phase.UPDATE or axis in self.state.chosen.get(key, {}):
                continue
            for option in topology.possible(key, self.state.chosen.get(key, {}), axis):
                strategy = topology.strategies(key)[option]
                if wanted(strategy, (strategy.outputs if is_output else strategy.inputs)[slot]):
                    self.state.chosen.setdefault(key, {})[axis] = int(option)
                    found.append(key)
                    break
        return found

    def _experts(self) -> list[str]:
        """Return the parameters of one matrix per expert: split along the first dim, what they are used in is, too."""
        found: dict[str, None] = {}
        experts = experts_of(self.topology.folded)
        for parameter in self.topology.folded.parameters:
            name = parameter.value.name
            for key, slot in self.topology.readers.get(name, ()):
                if self.topology.ops[key].phase is not Phase.FORWARD or name not in experts:
                    continue
                if any(
                    sharded_dim(strategy.inputs[slot]) == 0 and sharded_dim(strategy.outputs[0]) is not None
                    for strategy in self.topology.strategies(key)
                ):
                    found[name] = None
        if not found:
            raise TacticError("no parameter holds one matrix per expert", hint="leave ExpertParallel out")
        return list(found)

    def _zero(self, tactic: ZeRO, axis: int, number: int) -> None:
        if tactic.stage not in (1, 2, 3):
            raise TacticError(f"ZeRO has no stage {tactic.stage}", hint="it has 1, 2 and 3")
        states: dict[str, dict[Role, list[str]]] = {}
        for state in self.graph.states:
            states.setdefault(state.owner, {}).setdefault(state.role, []).append(state.input)
        for parameter in self.topology.folded.parameters:
            name = parameter.value.name
            own = states.get(name, {})
            dim = self._free_dim(parameter.value, axis)
            if dim is None and tactic.pads:
                dim = self._padded_dim(parameter.value, own, axis)
            if len(parameter.value.shape) < tactic.min_dims or dim is None:
                continue
            sums, size = own.get(Role.GRADIENT, []), parameter.value.shape[dim]
            moments = [moment for moment in own.get(Role.MOMENT, []) if self._size(moment, dim) == size]
            wanted = [*moments, *([name] if tactic.stage == 3 else [])]
            if tactic.stage == 1:
                for total in sums:
                    self.state.decide(total, axis, PINNED, number)
            else:
                wanted = [*sums, *wanted]
            self._shard_all([(value, dim) for value in wanted], axis, number)

    def _size(self, name: str, dim: int) -> int:
        """Return the size of a dim of a value; 0 without such a dim."""
        shape = self.graph.values[name].shape
        return shape[dim] if dim < len(shape) else 0

    def _free_dim(self, value: Value, axis: int) -> int | None:
        """Return the first dim that an axis can split and no other axis does; else the first it can split."""
        taken = {decided.dim for decided in self.state.splits.get(self.topology.of(value.name), {}).values()}
        dims = [dim for dim in range(len(value.shape)) if self.state.divides(value.name, dim, axis)]
        return next((dim for dim in dims if dim not in taken), dims[0] if dims else None)

    def _padded_dim(self, value: Value, states: Mapping[Role, list[str]], axis: int) -> int | None:
        """Return the dim that has the least to be padded to be split; None if the optimizer keeps other shapes."""
        values = self.graph.values
        kept = [values[name].shape for role, names in states.items() if role is not Role.PARAMETER for name in names]
        dims = [dim for dim in range(len(value.shape)) if self.state.pads(value.name, dim, axis)]
        if not dims or any(shape != value.shape for shape in kept):
            return None
        size = self.topology.mesh.axes[axis].size
        return min(dims, key=lambda dim: -(-value.shape[dim] // size) * size / value.shape[dim])

    def _megatron(self, axis: int, number: int, *, vocabulary: bool) -> None:
        """Split pairs of products: those within blocks first, then those of which a border of blocks lies between."""
        matrices = self._matrices()
        split = sum(
            [self._split_pair(name, axis, number, across=across) for across in (False, True) for name in matrices]
        )
        copy_key_heads(self.state, axis)
        if vocabulary:
            self._split_vocabulary(axis, number)
        if not split and not vocabulary:
            raise self._no_pair(matrices, axis)

    def _split_pair(self, name: str, axis: int, number: int, *, across: bool) -> bool:
        """Split a matrix by columns if the products of the pair it begins are in one block, or in several if `across`.

        Returns whether it was split.
        """
        if self.state.split(name, axis) is not None:
            return False
        dim = self.topology.rank(name) - 1
        trial = self.state.copy()
        if not trial.decide(name, axis, dim, number):
            return False
        propagate(trial, axis, [name], number)
        if not self._is_pair(trial, axis, across=across):
            return False
        self._shard_all([(name, dim)], axis, number)
        return True

    def _no_pair(self, matrices: list[str], axis: int) -> TacticError:
        """Return why there is no pair of products to split."""
        own = self.topology.mesh.axes[axis]
        message, hint = f"no pair of products can be split over {own.name} of {own.size}", "choose another tactic"
        if not matrices:
            return TacticError(f"{message}: no product of the model reads a parameter", hint=hint)
        whole = [name for name in matrices if self.state.split(name, axis) is None]
        if not whole:
            return TacticError(f"{message}: earlier tactics decided how each matrix lies on it", hint=hint)
        columns = {name: self.topology.rank(name) - 1 for name in whole}
        divided = [name for name, dim in columns.items() if self.state.divides(name, dim, axis)]
        if not divided:
            return TacticError(
                f"{message}: {self._indivisible(whole[0], columns[whole[0]], axis)}",
                hint=f"heads and hidden widths have to be divisible by {own.size}",
            )
        return TacticError(
            f"{message}: if {divided[0]!r} is split by columns, no other product with a parameter sums up the shards",
            hint=hint,
        )

    def _matrices(self) -> list[str]:
        """Return the parameters that forward products read, in the order of the graph."""
        found: dict[str, None] = {}
        for op in self.topology.ops.values():
            if op.phase is Phase.FORWARD and op.kind in _PRODUCTS:
                for name in op.inputs[1:]:
                    if name and self.topology.of(name) in self.topology.trained and self.topology.rank(name) >= 2:
                        found[self.topology.of(name)] = None
        return list(found)

    def _split_vocabulary(self, axis: int, number: int) -> None:
        """Split parameters along the vocabulary, with what the optimizer keeps of them.

        Rows are looked up where they are, and what is found is summed.
        """
        for name, dim in self._vocabulary():
            if not self._decided(name, axis, dim, number):
                continue
            if dim == 0:
                self._settle(name, axis, _sums_rows)
            states = [state.input for state in self.graph.states if state.owner == name and state.input != name]
            self._shard_all([(state, dim) for state in states], axis, number)
            self._conflicts += propagate(self.state, axis, [name], number)

    def _vocabulary(self) -> list[tuple[str, int]]:
        """Return the parameters outside the layers that have one row or column per class, with that dim.

        Classes are what the loss, or the model, tells apart: an embedding that is tied to the head, or its twin.
        What is only added, such as a table of as many positions, is none.
        """
        folded = self.topology.folded
        read = {"autopar::CrossEntropyStats": 0, "autopar::HeadStats": 1}  # logits, or the matrix that makes them
        scored = [op.inputs[read[op.kind]] for op in self.topology.ops.values() if op.kind in read]
        classes = {
            self.graph.values[name].shape[-1] for name in scored or self.graph.outputs if self.topology.rank(name)
        }
        found = []
        for parameter in folded.parameters:
            shape = parameter.value.shape
            kinds = {self.topology.ops[key].kind for key, _ in self.topology.readers.get(parameter.value.name, ())}
            if parameter.producer.kind not in layer_kinds(folded) and len(shape) == 2 and kinds & _CLASSED:
                found += [(parameter.value.name, dim) for dim, size in enumerate(shape) if size in classes][:1]
        return found

    def _is_pair(self, trial: State, axis: int, *, across: bool) -> bool:
        """Whether what a trial has split is summed up again by a product with a parameter.

        It stays within its blocks, or, if `across`, whatever reads it in another block takes it as it is split.
        """
        crossing = [
            cls
            for cls in self.topology.boundaries
            if (decided := trial.split(cls, axis)) and decided.dim != PINNED and self.state.split(cls, axis) is None
        ]
        if (crossing and not across) or not all(self._is_read_split(trial, cls, axis) for cls in crossing):
            return False
        for key, chosen in trial.chosen.items():
            if axis in chosen and axis not in self.state.chosen.get(key, {}):
                op = self.topology.ops[key]
                strategy = self.topology.strategies(key)[chosen[axis]]
                if op.phase is Phase.FORWARD and is_partial(strategy.outputs[0]):
                    return any(self.topology.of(name) in self.topology.trained for name in op.inputs if name)
        return False

    def _is_read_split(self, trial: State, cls: str, axis: int) -> bool:
        """Whether every forward op that reads a class takes it as it is split."""
        decided = trial.split(cls, axis)
        assert decided is not None, "it is split"
        for key, slot in self.topology.readers.get(cls, ()):
            if self.topology.ops[key].phase is Phase.FORWARD:
                strategy = trial.strategy(key, axis)
                if strategy is None or sharded_dim(strategy.inputs[slot]) != decided.dim:
                    return False
        return True

    def _sequence(self, axis: int, number: int) -> None:
        """Split what passes between blocks along the dim after the batch."""
        wanted = []
        for cls in self.topology.boundaries:
            dim = self.batch.get(cls)
            if dim is not None and self.topology.rank(cls) == dim + 3 and self.state.split(cls, axis) is None:
                wanted.append((cls, dim + 1))
        if not wanted:
            raise TacticError(
                "nothing that passes between blocks has a sequence dim", hint="leave SequenceParallel out"
            )
        self._shard_all(wanted, axis, number)


def _keeps_apart(strategy: Strategy, own: Placement) -> bool:
    """Whether a product of experts splits them and nothing else."""
    terms = any(map(is_partial, (*strategy.inputs, *strategy.outputs)))
    return sharded_dim(own) == 0 and sharded_dim(strategy.outputs[0]) == 0 and not terms


def _splits_rows(op: Op, strategy: Strategy, dim: int) -> bool:
    """Whether an op that reads or writes rows of experts splits them along a dim, and leaves no terms."""
    rows = [strategy.inputs[slot] for slot in _ROWS[op.kind][0]] + [
        strategy.outputs[slot] for slot in _ROWS[op.kind][1]
    ]
    terms = any(map(is_partial, (*strategy.inputs, *strategy.outputs)))
    return all(sharded_dim(own) == dim for own in rows) and not terms


def _splits_heads(strategy: Strategy, dim: int) -> bool:
    """Whether attention, or its gradient, splits the heads of queries, keys and values, and what it makes of them."""
    read, made = strategy.inputs[:3], strategy.outputs
    return strategy.local is None and all(sharded_dim(own) == dim for own in (*read, *made))


def _sums_rows(strategy: Strategy, own: Placement) -> bool:
    """Whether a look-up splits a table by rows and leaves terms."""
    terms = all(map(is_partial, strategy.outputs)) and not any(map(is_partial, strategy.inputs))
    return sharded_dim(own) == 0 and terms


def _suffix(name: str, owner: str) -> str:
    """Return what a state's name has after that of its parameter."""
    return name.removeprefix(owner)

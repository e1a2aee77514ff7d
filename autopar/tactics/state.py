"""What has been decided so far: which dim of which value an axis splits, and what each op does on it.

The engine works on the distinct blocks of a graph. Values that have to lie alike wherever they meet are one *class*:
what passes between blocks, the sum of a gradient before and after a microbatch, a moment before and after the update, a
parameter that several blocks read. A class is split by an axis along a dim, pinned (never to be split), or open.

Nothing is ever taken back: a decision holds until the end, and a later tactic works with what is left open.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.context_parallelism import ContextKind
from autopar.discover import Rules, Strategy
from autopar.folding.fold import Folded, Source, boundary_groups
from autopar.folding.graph_facts import dealt_lengths
from autopar.formulate.op_strategies import OpStrategies, options
from autopar.formulate.placement_semantics import PlacementSemantics, meaning
from autopar.ir.graph import Op, Phase, Role
from autopar.sharding import Mesh, Partial, Placements, Replicate, Shard, deals

OpKey = tuple[int, int]
"""Kind of block and position of an op in it."""

PINNED = -1
"""In place of a dim: the axis must not split the class."""


@dataclass(frozen=True, slots=True)
class Decided:
    """That an axis splits a class along a dim, or must not.

    Attributes:
        dim: The dim, or `PINNED`.
        order: How many decisions came before it; the earlier one wins a conflict.
        tactic: Number of the tactic it comes from.
    """

    dim: int
    order: int
    tactic: int


class Topology:
    """What never changes while tactics are applied: classes of values, who reads them, what ops can do.

    Attributes:
        folded: The graph by its distinct blocks.
        mesh: The devices of one stage.
        meaning: Which reduction a partial value stands for, how many chunks a dim is sharded in.
        stateful: Classes of parameters, of moments, of sums of gradients and of what is added to these.
        uneven: Whether the software takes uneven blocks.
        dealt: Lengths of dims that may be dealt out in such blocks wherever a strategy holds on them.
    """

    def __init__(self, folded: Folded, rules: Rules, mesh: Mesh, *, uneven: bool = True) -> None:
        self.folded, self.mesh = folded, mesh
        self.meaning: PlacementSemantics = meaning(folded, rules, any_terms=True)
        graph = folded.graph
        self.uneven, self.dealt = uneven, dealt_lengths(folded) if uneven else frozenset[int]()
        self.ops: dict[OpKey, Op] = {
            (kind.id, position): op for kind in folded.kinds for position, op in enumerate(kind.ops)
        }
        self._alias: dict[str, str] = {}
        self._join_states()
        self._join_boundaries()
        states = {self.of(state.input) for state in graph.states}
        sums = {state.output for state in graph.states if state.role is Role.GRADIENT}
        terms = (name for op in self.ops.values() if sums & set(op.outputs) for name in op.inputs if name)
        self.stateful = frozenset(states.union(map(self.of, terms)))
        self.boundary_set = frozenset(self.boundaries)
        self.trained = {state.input for state in graph.states if state.role in (Role.PARAMETER,)}
        self.readers: dict[str, list[tuple[OpKey, int]]] = defaultdict(list)
        self.makers: dict[str, list[tuple[OpKey, int]]] = defaultdict(list)
        for key, op in self.ops.items():
            for slot, name in enumerate(op.inputs):
                if name and self.is_placed(op, name):
                    self.readers[self.of(name)].append((key, slot))
            for slot, name in enumerate(op.outputs):
                if name:
                    self.makers[self.of(name)].append((key, slot))

    def _join_states(self) -> None:
        graph, folded = self.folded.graph, self.folded
        for state in graph.states:
            if state.role in (Role.GRADIENT, Role.MOMENT) and state.output != state.input:
                self._alias[state.output] = state.input
        names = {parameter.producer: parameter.value.name for parameter in folded.parameters}
        for name, producer in folded.by_value.items():
            if producer.source is Source.STATE and names[producer] != name:
                self._alias[name] = names[producer]

    def _join_boundaries(self) -> None:
        """Give everything that can meet in one arrival one class, by the name of its first producer's output."""
        folded = self.folded
        self.boundaries: list[str] = []
        for producers, arrivals in boundary_groups(folded):
            outputs = [folded.kinds[p.kind].ops[p.position].outputs[p.slot] for p in producers]
            self.boundaries.append(outputs[0])
            for name in (*outputs[1:], *(arrival.value for _, arrival in arrivals)):
                if name != outputs[0]:
                    self._alias[name] = outputs[0]

    def of(self, name: str) -> str:
        """Return the class of a value."""
        return self._alias.get(name, name)

    def is_placed(self, op: Op, name: str) -> bool:
        """Whether an input of an op has a placement that anybody else knows of.

        Constants and buffers are everywhere, and the parameter an update reads is the optimizer's own copy.
        """
        if op.phase is Phase.UPDATE and name in self.trained:
            return False
        return name not in self.folded.free or name in self.folded.graph.inputs

    def strategies(self, key: OpKey) -> tuple[Strategy, ...]:
        """Return what an op can do on one axis; doing everything everywhere comes first."""
        return self._options(key).on_one_axis

    def passing(self, key: OpKey) -> tuple[int, ...]:
        """Return the strategies on one axis by which an op takes nothing but terms and leaves terms."""
        if key not in self._passing:
            op = self.ops[key]
            slots = [slot for slot, name in enumerate(op.inputs) if name and self.is_placed(op, name)]
            self._passing[key] = tuple(
                number
                for number, strategy in enumerate(self.strategies(key))
                if slots and all(map(is_partial, (*(strategy.inputs[slot] for slot in slots), *strategy.outputs)))
            )
        return self._passing[key]

    def rank(self, name: str) -> int:
        """Return the number of dims of a value."""
        return len(self.folded.graph.values[name].shape)

    @cached_property
    def _by_op(self) -> dict[OpKey, OpStrategies]:
        return {}

    @cached_property
    def _passing(self) -> dict[OpKey, tuple[int, ...]]:
        return {}

    def _options(self, key: OpKey) -> OpStrategies:
        if key not in self._by_op:
            op = self.ops[key]
            strategies = sorted(self.meaning.strategies(op), key=_order)
            graph, free = self.folded.graph, self.folded.free
            self._by_op[key] = options(graph, op, strategies, self.mesh, free, dealt=self.dealt, pads=self.pads(key))
        return self._by_op[key]

    def pads(self, key: OpKey) -> bool:
        """Whether an op updates a parameter, or adds a gradient to its sum, element by element: dims may be padded."""
        op, values, states = self.ops[key], self.folded.graph.values, self.stateful
        names = [name for name in (*op.inputs, *op.outputs) if name and values[name].shape]
        is_sum = op.kind == "Add" and op.phase is Phase.BACKWARD and self.of(op.outputs[0]) in states
        return (op.phase is Phase.UPDATE or is_sum) and len({values[name].shape for name in names}) == 1

    def possible(self, key: OpKey, chosen: Mapping[int, int], axis: int) -> NDArray[np.int64]:
        """Return the strategies an op can follow on an axis beside those chosen on others; 0 on open ones."""
        found = self._options(key)
        rows = np.ones(found.count, dtype=bool)
        for other in range(len(self.mesh.axes)):
            if other != axis:
                rows &= found.combined[:, other] == chosen.get(other, 0)
        return np.unique(found.combined[rows, axis])


@dataclass(slots=True)
class State:
    """What has been decided.

    Attributes:
        topology: What it is about.
        splits: By class and axis.
        chosen: By op, then axis: number of its strategy on one axis.
        decisions: How many there are.
        placed: Placements that were said exactly, by class.
        copies: Placements of copies that were said exactly, by name; None if writing down has to find them.
        context: Kind of context parallelism by axis.
    """

    topology: Topology
    splits: dict[str, dict[int, Decided]] = field(default_factory=dict)
    chosen: dict[OpKey, dict[int, int]] = field(default_factory=dict)
    decisions: int = 0
    placed: dict[str, Placements] = field(default_factory=dict)
    copies: dict[str, Placements] | None = None
    context: dict[int, ContextKind] = field(default_factory=dict)

    def copy(self) -> "State":
        """Return a state that can be tried out."""
        return State(
            self.topology,
            {name: dict(axes) for name, axes in self.splits.items()},
            {key: dict(axes) for key, axes in self.chosen.items()},
            self.decisions,
            dict(self.placed),
            self.copies if self.copies is None else dict(self.copies),
            dict(self.context),
        )

    def without(self, ops: Iterable[OpKey], axis: int) -> "State":
        """Return a state, to be looked at only, in which it is open again what ops do on an axis."""
        opened = {key: {other: n for other, n in self.chosen[key].items() if other != axis} for key in ops}
        return replace(self, chosen={**self.chosen, **opened})

    def take(self, other: "State") -> None:
        """Become what another state of the same graph is."""
        self.splits, self.chosen, self.decisions = other.splits, other.chosen, other.decisions
        self.placed, self.copies, self.context = other.placed, other.copies, other.context

    def split(self, name: str, axis: int) -> Decided | None:
        """Return what is decided about the class of a value on an axis."""
        return self.splits.get(self.topology.of(name), {}).get(axis)

    def divides(self, name: str, dim: int, axis: int) -> bool:
        """Whether an axis can split a dim of a value on top of the axes that do."""
        value = self.topology.folded.graph.values[name]
        pieces = self.topology.mesh.axes[axis].size * self.topology.meaning.chunks(name)[dim]
        for other, decided in self.splits.get(self.topology.of(name), {}).items():
            if other != axis and decided.dim == dim:
                pieces *= self.topology.mesh.axes[other].size
        return value.shape[dim] % pieces == 0

    def pads(self, name: str, dim: int, axis: int) -> bool:
        """Whether an axis can deal out a dim in uneven blocks: a vocabulary, or a dim of a parameter or its state."""
        cls = self.topology.of(name)
        others = [decided.dim for other, decided in self.splits.get(cls, {}).items() if other != axis]
        size = self.topology.folded.graph.values[name].shape[dim]
        alone = dim not in others and self.topology.meaning.chunks(name)[dim] == 1
        count = self.topology.mesh.axes[axis].size
        is_dealt = size in self.topology.dealt and deals(size, count)
        is_state = self.topology.uneven and cls in self.topology.stateful and size >= count
        return alone and (is_dealt or is_state)

    def decide(self, name: str, axis: int, dim: int, tactic: int) -> bool:
        """Split a class, or pin it; return False if that was decided before, or the dim cannot be divided or padded."""
        cls = self.topology.of(name)
        axes = self.splits.setdefault(cls, {})
        if axis in axes or (dim != PINNED and not self.divides(cls, dim, axis) and not self.pads(cls, dim, axis)):
            return False
        axes[axis] = Decided(dim, self.decisions, tactic)
        self.decisions += 1
        return True

    def strategy(self, key: OpKey, axis: int) -> Strategy | None:
        """Return what an op does on an axis; None if that is open."""
        number = self.chosen.get(key, {}).get(axis)
        return None if number is None else self.topology.strategies(key)[number]


def _order(strategy: Strategy) -> tuple[bool, bool]:
    """Return what puts doing everything everywhere first, and sums before other terms of the same values."""
    terms = [placement for placement in (*strategy.inputs, *strategy.outputs) if isinstance(placement, Partial)]
    return not strategy.is_replicate, any(placement.reduce != "sum" for placement in terms)


def sharded_dim(placement: object) -> int | None:
    """Return the dim a placement splits; None if it splits none."""
    return placement.dim if isinstance(placement, Shard) else None


def is_partial(placement: object) -> bool:
    """Whether a placement is of terms still to be put together."""
    return isinstance(placement, Partial)


def is_whole(placement: object) -> bool:
    """Whether every device has the whole value."""
    return isinstance(placement, Replicate)

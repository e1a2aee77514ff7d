"""Meaning of the placements of every value: the reduction of a partial one, the number of chunks of a sharded dim.

A placement problem distinguishes R, P and S(d) per mesh axis. Discovery distinguishes more: terms of a maximum, a dim
in three chunks. So the finer meaning is a property of the *value*, equal at its definition and all its uses, and is
decided before strategies are listed:

    reduction   one per value:         P of the largest logit is P(max)
    chunks      one per value and dim: S(1) of a fused query-key-value projection is S(1/3)

Strategies that need another meaning of a placement are left out. Values that pass between blocks or are written back
(parameters, gradient sums, moments) have one meaning on both sides.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Generic, TypeVar

from autopar.discover import Rule, Rules, Strategy
from autopar.folding.fold import Folded, Producer, Source, boundary_groups
from autopar.folding.graph_facts import gradient_terms, states_of
from autopar.ir.graph import Op, Role
from autopar.sharding import REDUCTIONS, Mesh, Partial, Placement, Placements, Replicate, Shard, uneven

Key = TypeVar("Key", bound=Hashable)
Dim = tuple[str, int]
"""(class of values, index of the dim); the class is named after one of its values."""


@dataclass(frozen=True, slots=True, eq=False)
class PlacementSemantics:
    """Meaning of the placements of all values of a folded graph.

    Attributes:
        folded: The graph.
        rules: Discovered strategies of its ops.
    """

    folded: Folded
    rules: Rules
    _classes: "_ValueClasses"
    _reductions: Mapping[str, str]  # by class; only classes that may be partial
    _chunks: Mapping[Dim, int]  # only dims with more than one chunk
    _in_chunks: frozenset[str]  # classes with a dim in `_chunks`
    _arriving: frozenset[tuple[int, str]]  # (block, value from another block) of values that are never partial there
    _any_terms: bool  # whether values may have terms of any reduction, between blocks too
    _strategies: dict[Hashable, tuple[Strategy, ...]]  # cache, by the rule and the properties of the op's values

    def reduction(self, value: str) -> str | None:
        """Return the reduction of a value's partial placements; None if the value is never partial."""
        return self._reductions.get(self._classes.of(value))

    def chunks(self, value: str) -> tuple[int, ...]:
        """Return for each dim of a value the number of chunks it is cut into before it is sharded."""
        name, rank = self._classes.of(value), len(self.folded.graph.values[value].shape)
        if name not in self._in_chunks:
            return (1,) * rank
        return tuple(self._chunks.get((name, dim), 1) for dim in range(rank))

    def placements(self, value: str, number: int, mesh: Mesh) -> Placements:
        """Return the placements that a placement number of a value encodes (see `op_strategies.py`)."""
        shape = self.folded.graph.values[value].shape
        rank = len(shape)
        found: list[Placement] = []
        for _ in mesh.axes:
            number, digit = divmod(number, rank + 2)
            match digit:
                case 0:
                    found.append(Replicate())
                case 1:
                    reduce = self.reduction(value)
                    assert reduce is not None, f"{value} is never partial"
                    found.append(Partial(reduce))
                case _:
                    found.append(Shard(digit - 2, self.chunks(value)[digit - 2]))
        return uneven(shape, tuple(reversed(found)), mesh)

    def strategies(self, op: Op) -> tuple[Strategy, ...]:
        """Return the strategies of an op on one mesh axis, with the chunks of its values filled in.

        Ops of one rule whose values have equal meanings get the same tuple object.
        """
        rule = self.rules.of(op)
        key = (id(rule), *(self._value_key(op, name) for name in (*op.inputs, *op.outputs)))
        if key not in self._strategies:
            found = (self._adapted(op, strategy) for strategy in rule.strategies)
            self._strategies[key] = tuple(strategy for strategy in found if strategy is not None)
        return self._strategies[key]

    def _value_key(self, op: Op, name: str) -> Hashable:
        """Return all properties of a value that decide which strategies of the op are listed."""
        if not name or name in self.folded.free:
            return None
        return self.reduction(name), (op.block, name) in self._arriving, self.chunks(name)

    def _adapted(self, op: Op, strategy: Strategy) -> Strategy | None:
        """Return a strategy with the chunks of the op's values; None if it needs another meaning of a placement."""
        factors = set()
        for name, placement in chain.from_iterable(_placed_sides(op, strategy, self.folded.free)):
            match placement:
                case Partial(reduce) if not self._any_terms and (
                    reduce != self.reduction(name) or (op.block, name) in self._arriving
                ):
                    return None
                case Shard(dim, chunks):
                    whole = self._chunks.get((self._classes.of(name), dim), 1)
                    if whole % chunks:
                        return None
                    factors.add(whole // chunks)
        if len(factors) > 1:
            return None
        factor = factors.pop() if factors else 1
        if factor == 1:
            return strategy
        return _multiply_chunks(strategy, factor) if strategy.cyclic else None


@lru_cache(maxsize=32)  # one entry per graph, shared by all meshes
def meaning(folded: Folded, rules: Rules, *, any_terms: bool = False) -> PlacementSemantics:
    """Decide the meaning of the placements of all values.

    Args:
        folded: The graph.
        rules: Discovered strategies of its ops.
        any_terms: Whether to list all strategies with partial values: with several reductions of one value, and of
            values that pass between blocks. The caller then has to make them consistent.

    Reductions are decided in graph order. The first op that can leave partial terms of a value, given the reductions of
    its own inputs, decides, and prefers sums. A value is never partial if no op leaves partial terms of it. Neither are
    parameters, moments and, unless `any_terms`, values from another block, except terms of the gradient of a parameter
    that several blocks read. Strategies that read other partial values are left out.

    Chunks are decided in two steps. Strategies that also hold for block-cyclic shards tie the dims they shard; tied
    dims have equal chunks. Then strategies that ask for chunks get them, the fewest chunks first, on three conditions:
    no earlier strategy asked for another count; the tied dims include a dim of a parameter, where the layout of a fused
    projection is chosen; and every tied dim that two devices could share without chunks can be shared with them. All
    other dims have one chunk.
    """
    ops = [folded.kinds[kind].ops[position] for kind, position in _ops_in_order(folded.pattern)]
    classes = _classes(folded.pattern)
    reductions, chunks = _reductions(ops, folded, rules, classes), _chunks(ops, folded, rules, classes)
    added = gradient_terms(folded)
    arriving = {
        (folded.kinds[kind].representative, arrival.value)
        for producers, arrivals in boundary_groups(folded)
        for kind, arrival in arrivals
        if not added.issuperset(producers)
    }
    in_chunks = frozenset(name for name, _ in chunks)
    return PlacementSemantics(folded, rules, classes, reductions, chunks, in_chunks, frozenset(arriving), any_terms, {})


@lru_cache(maxsize=32)
def _ops_in_order(folded: Folded) -> tuple[tuple[int, int], ...]:
    """Return kind and position of the ops of all kinds, in graph order."""
    places = {op.name: (kind.id, position) for kind in folded.kinds for position, op in enumerate(kind.ops)}
    return tuple(places[op.name] for op in folded.graph.ops if op.name in places)


class _DisjointSets(Generic[Key]):
    """Disjoint sets with path compression (union-find)."""

    def __init__(self) -> None:
        self._parent: dict[Key, Key] = {}

    def find(self, key: Key) -> Key:
        """Return the representative of a key's set; an unknown key starts a set of its own."""
        root = key
        while (above := self._parent.get(root, root)) != root:
            root = above
        while key != root:
            self._parent[key], key = root, self._parent.get(key, root)
        self._parent.setdefault(root, root)
        return root

    def join(self, first: Key, second: Key) -> None:
        """Merge two sets; the representative of the first one remains."""
        self._parent[self.find(second)] = self.find(first)

    def sets(self) -> dict[Key, list[Key]]:
        """Return the members of every set, by representative."""
        members: dict[Key, list[Key]] = {}
        for key in list(self._parent):
            members.setdefault(self.find(key), []).append(key)
        return members


class _ValueClasses:
    """Classes of values with one meaning.

    A class contains a value in all instances of its kind, on both sides of a boundary, and before and after an update.

    Args:
        folded: The graph.

    Attributes:
        sums: Classes of gradient sums.
        parameters: Classes of parameters.
    """

    def __init__(self, folded: Folded) -> None:
        self._folded = folded
        self._parameters = {parameter.producer: parameter.value.name for parameter in folded.parameters}
        self._union: _DisjointSets[str] = _DisjointSets()
        self._found: dict[str, str] = {}
        for producers, _ in boundary_groups(folded):
            names = [self._representative(producer) for producer in producers]
            for name in names[1:]:
                self._union.join(names[0], name)
        for state in states_of(folded).written.values():
            self._union.join(self._name(state.input), self._name(state.output))
        states = folded.graph.states
        self.sums = frozenset(self.of(state.input) for state in states if state.role is Role.GRADIENT)
        self.parameters = frozenset(self.of(state.input) for state in states if state.role is Role.PARAMETER)

    def of(self, value: str) -> str:
        """Return the name of the class of a value."""
        found = self._found.get(value)
        if found is None:
            found = self._found[value] = self._union.find(self._name(value))
        return found

    def _name(self, value: str) -> str:
        """Return the name of a value in the representative instance."""
        producer = self._folded.by_value.get(value)
        return value if producer is None else self._representative(producer)

    def _representative(self, producer: Producer) -> str:
        """Return the name of a produced value in the representative instance of its kind."""
        if producer.source is Source.STATE:
            return self._parameters[producer]
        return self._folded.kinds[producer.kind].ops[producer.position].outputs[producer.slot]


@lru_cache(maxsize=32)
def _classes(folded: Folded) -> _ValueClasses:
    """Return the classes of values; cached by the pattern of the graph, which all microbatch sizes share."""
    return _ValueClasses(folded)


def _placed_values(
    names: Sequence[str], placements: Placements, free: frozenset[str]
) -> Iterator[tuple[str, Placement]]:
    """Yield the values of an op that have a placement of their own; data and constants have none."""
    for name, placement in zip(names, placements, strict=True):
        if name and name not in free:
            yield name, placement


def _placed_sides(op: Op, strategy: Strategy, free: frozenset[str]) -> tuple[Iterator[tuple[str, Placement]], ...]:
    """Return the placed inputs and the placed outputs of an op."""
    return _placed_values(op.inputs, strategy.inputs, free), _placed_values(op.outputs, strategy.outputs, free)


def _multiply_chunks(strategy: Strategy, factor: int) -> Strategy:
    """Return a strategy with the chunks multiplied by `factor`."""

    def scaled(placements: Placements) -> Placements:
        return tuple(Shard(p.dim, p.chunks * factor) if isinstance(p, Shard) else p for p in placements)

    return replace(strategy, inputs=scaled(strategy.inputs), outputs=scaled(strategy.outputs))


def _reductions(ops: Sequence[Op], folded: Folded, rules: Rules, classes: _ValueClasses) -> dict[str, str]:
    """Return the reduction of each class that has partial values."""
    found: dict[str, str] = {}
    leaving_terms: dict[int, list[Strategy]] = {}  # by rule, the strategies that leave partial terms
    for op in ops:
        rule = rules.of(op)
        if id(rule) not in leaving_terms:
            leaving_terms[id(rule)] = [
                each for each in rule.strategies if any(isinstance(p, Partial) for p in each.outputs)
            ]
        offered: dict[str, set[str]] = {}
        for strategy in leaving_terms[id(rule)]:
            read, made = (
                [(classes.of(name), placement.reduce) for name, placement in placed if isinstance(placement, Partial)]
                for placed in _placed_sides(op, strategy, folded.free)
            )
            in_place = classes.sums & {name for name, _ in made}  # partial terms added to partial terms
            if all(found.get(name) == reduce for name, reduce in read if name in found or name not in in_place):
                for name, reduce in made:
                    offered.setdefault(name, set()).add(reduce)
        for name, reductions in offered.items():
            found.setdefault(name, min(reductions, key=REDUCTIONS.index))
    return found


@dataclass(frozen=True, slots=True)
class _ShardedDims:
    """The dims that strategies of one rule shard together, as (operand, dim); free operands are left out.

    Attributes:
        tied: Distinct sets of dims of strategies that also hold for block-cyclic shards.
        asking: Dims of strategies that ask for chunks, with the number of chunks.
    """

    tied: tuple[tuple[tuple[int, int], ...], ...]
    asking: tuple[tuple[tuple[int, int, int], ...], ...]


def _sharded_dims(rule: Rule, places: Sequence[int]) -> _ShardedDims:
    """Return the dims that strategies of a rule shard together.

    Args:
        rule: The rule.
        places: Indices of the operands that have a placement of their own.
    """
    tied: dict[tuple[tuple[int, int], ...], None] = {}
    asking = []
    for strategy in rule.strategies:
        placements = (*strategy.inputs, *strategy.outputs)
        sharded = [(place, placements[place]) for place in places]
        dims = tuple((place, p.dim, p.chunks) for place, p in sharded if isinstance(p, Shard))
        if any(chunks > 1 for _, _, chunks in dims):
            asking.append(dims)
        elif strategy.cyclic:
            tied[tuple((place, dim) for place, dim, _ in dims)] = None
    return _ShardedDims(tuple(tied), tuple(asking))


def _chunks(ops: Sequence[Op], folded: Folded, rules: Rules, classes: _ValueClasses) -> dict[Dim, int]:
    """Return the number of chunks of every dim that has more than one, by class and dim."""
    ties: _DisjointSets[Dim] = _DisjointSets()
    asking: list[list[tuple[Dim, int]]] = []
    known: dict[Hashable, _ShardedDims] = {}
    for op in ops:
        rule, names = rules.of(op), (*op.inputs, *op.outputs)
        places = tuple(place for place, name in enumerate(names) if name and name not in folded.free)
        if (id(rule), places) not in known:
            known[id(rule), places] = _sharded_dims(rule, places)
        lines = known[id(rule), places]
        owners = [classes.of(name) if name else "" for name in names]
        for dims in lines.tied:
            for place, dim in dims:
                ties.join((owners[dims[0][0]], dims[0][1]), (owners[place], dim))
        asking += [[((owners[place], dim), chunks) for place, dim, chunks in dims] for dims in lines.asking]
    members = ties.sets()
    values = folded.graph.values

    def can_be_cut(dim: Dim, chunks: int) -> bool:
        """Whether all dims tied to a dim can be cut into `chunks` chunks and still be shared by two devices."""
        tied = members.get(dim, [dim])
        sizes = [values[name].shape[index] for name, index in tied]
        return any(name in classes.parameters for name, _ in tied) and all(
            size % (2 * chunks) == 0 for size in sizes if size % 2 == 0
        )

    decided: dict[Dim, int] = {}
    for sharded in sorted(asking, key=lambda dims: max(chunks for _, chunks in dims)):
        asked: dict[Dim, int] = {}
        fits = all(asked.setdefault(ties.find(dim), chunks) == chunks for dim, chunks in sharded)
        for root, chunks in asked.items():
            fits &= decided[root] == chunks if root in decided else chunks == 1 or can_be_cut(root, chunks)
        if fits:
            decided |= asked
    return {dim: count for root, count in decided.items() if count > 1 for dim in members.get(root, [root])}

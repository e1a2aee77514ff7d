"""What the placements of every value stand for: which reduction a partial one, how many chunks a sharded dim.

A placement problem knows three things a mesh axis can do to a tensor: R, P and S(d). Discovery knows more: terms of a
maximum, a dim in three chunks. So the finer meaning is a property of the *value*, the same for all that define and read
it, decided before any strategy is listed:

    reduction   one per value:        P of the largest logit is P(max)
    chunks      one per value and dim: S(1) of a fused query-key-value projection is S(1/3)

Strategies that mean something else by the same placement are not offered. What changes between blocks or is written
back (parameters, sums of gradients, moments) has one meaning on both sides.
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
from autopar.sharding import REDUCTIONS, Partial, Placement, Placements, Replicate, Shard

Key = TypeVar("Key", bound=Hashable)
Dim = tuple[str, int]
"""A dim of a class of values, which goes by the name of one of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Meaning:
    """What the placements of the values of a folded graph stand for.

    Attributes:
        folded: The graph.
        rules: What its ops can do.
    """

    folded: Folded
    rules: Rules
    _classes: "_Classes"
    _reductions: Mapping[str, str]  # by class, of those that are ever partial
    _chunks: Mapping[Dim, int]  # of dims that have more than one
    _in_chunks: frozenset[str]  # classes that have such a dim
    _arriving: frozenset[tuple[int, str]]  # (block, value from another block), if never partial there
    _any_terms: bool  # whether values may be terms of anything, between blocks too
    _strategies: dict[Hashable, tuple[Strategy, ...]]  # found before, by the rule and what is said of the values

    def reduction(self, value: str) -> str | None:
        """Return what the terms of a value are put together by when it is partial; None if it never is."""
        return self._reductions.get(self._classes.of(value))

    def chunks(self, value: str) -> tuple[int, ...]:
        """Return for each dim of a value into how many chunks it is cut before it is sharded."""
        name, rank = self._classes.of(value), len(self.folded.graph.values[value].shape)
        if name not in self._in_chunks:
            return (1,) * rank
        return tuple(self._chunks.get((name, dim), 1) for dim in range(rank))

    def placements(self, value: str, number: int, num_axes: int) -> Placements:
        """Return the placements that are number `number` of a value (see `op_strategies.py`)."""
        rank = len(self.folded.graph.values[value].shape)
        found: list[Placement] = []
        for _ in range(num_axes):
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
        return tuple(reversed(found))

    def strategies(self, op: Op) -> tuple[Strategy, ...]:
        """Return what an op can do on one mesh axis with the placements its values have, their chunks filled in.

        Ops of one rule whose values mean the same get one and the same tuple.
        """
        rule = self.rules.of(op)
        key = (id(rule), *(self._said_of(op, name) for name in (*op.inputs, *op.outputs)))
        if key not in self._strategies:
            found = (self._adapted(op, strategy) for strategy in rule.strategies)
            self._strategies[key] = tuple(strategy for strategy in found if strategy is not None)
        return self._strategies[key]

    def _said_of(self, op: Op, name: str) -> Hashable:
        """Return all of a value of an op that decides which strategies are offered."""
        if not name or name in self.folded.free:
            return None
        return self.reduction(name), (op.block, name) in self._arriving, self.chunks(name)

    def _adapted(self, op: Op, strategy: Strategy) -> Strategy | None:
        """Return a strategy with the chunks of its op's values; None if it means something else by its placements."""
        factors = set()
        for name, placement in chain.from_iterable(_sides(op, strategy, self.folded.free)):
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
        return _times(strategy, factor) if strategy.cyclic else None


@lru_cache(maxsize=32)  # meshes are many, graphs few
def meaning(folded: Folded, rules: Rules, *, any_terms: bool = False) -> Meaning:
    """Decide what the placements of all values stand for.

    Args:
        folded: The graph.
        rules: What its ops can do.
        any_terms: Whether to offer all strategies with terms: of several reductions of one value, and of values on
            their way between blocks. Whoever asks for it has to fit them together.

    Reductions are decided in the order of the graph: the first op that can leave terms of a value, given what the terms
    of its own inputs are, decides, and prefers sums. Values that no op leaves terms of are never partial, nor are
    parameters, moments and, unless told otherwise, what arrives from another block, but for what is only added to the
    gradient of a parameter that several blocks read: what reads terms of them is not offered.

    Chunks are found in two steps. Strategies that hold block-cyclic too tie the dims they shard; tied dims have one
    count. Then the strategies that ask for chunks, the fewest chunks first, get them where no strategy before them asks
    for another count, where the dims that are cut in chunks reach a parameter (it is there that a fused projection is
    chosen to lie in chunks), and where no dim is left that two devices could share before and cannot share now. All
    other dims have one chunk.
    """
    ops = [folded.kinds[kind].ops[position] for kind, position in _in_order(folded.pattern)]
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
    return Meaning(folded, rules, classes, reductions, chunks, in_chunks, frozenset(arriving), any_terms, {})


@lru_cache(maxsize=32)
def _in_order(folded: Folded) -> tuple[tuple[int, int], ...]:
    """Return kind and position of the ops of all kinds, in the order of the graph."""
    places = {op.name: (kind.id, position) for kind in folded.kinds for position, op in enumerate(kind.ops)}
    return tuple(places[op.name] for op in folded.graph.ops if op.name in places)


class _Union(Generic[Key]):
    """Disjoint sets."""

    def __init__(self) -> None:
        self._parent: dict[Key, Key] = {}

    def find(self, key: Key) -> Key:
        """Return the representative of a key's set; a new key is a set of its own."""
        root = key
        while (above := self._parent.get(root, root)) != root:
            root = above
        while key != root:
            self._parent[key], key = root, self._parent.get(key, root)
        self._parent.setdefault(root, root)
        return root

    def join(self, first: Key, second: Key) -> None:
        """Make two sets one, which goes by the representative of the first."""
        self._parent[self.find(second)] = self.find(first)

    def sets(self) -> dict[Key, list[Key]]:
        """Return the members of every set, by representative."""
        members: dict[Key, list[Key]] = {}
        for key in list(self._parent):
            members.setdefault(self.find(key), []).append(key)
        return members


class _Classes:
    """Values that have one meaning: those of all instances of a kind, on both sides of a boundary, before and after.

    Args:
        folded: The graph.

    Attributes:
        sums: Classes of sums of gradients.
        parameters: Classes of parameters.
    """

    def __init__(self, folded: Folded) -> None:
        self._folded = folded
        self._parameters = {parameter.producer: parameter.value.name for parameter in folded.parameters}
        self._union: _Union[str] = _Union()
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
        """Return the name of a value's class."""
        found = self._found.get(value)
        if found is None:
            found = self._found[value] = self._union.find(self._name(value))
        return found

    def _name(self, value: str) -> str:
        producer = self._folded.by_value.get(value)
        return value if producer is None else self._representative(producer)

    def _representative(self, producer: Producer) -> str:
        if producer.source is Source.STATE:
            return self._parameters[producer]
        return self._folded.kinds[producer.kind].ops[producer.position].outputs[producer.slot]


@lru_cache(maxsize=32)
def _classes(folded: Folded) -> _Classes:
    """Return the classes of values; those of one microbatch size are those of all."""
    return _Classes(folded)


def _placed(names: Sequence[str], placements: Placements, free: frozenset[str]) -> Iterator[tuple[str, Placement]]:
    """Yield the values of an op that others place too; data and constants lie wherever they are needed."""
    for name, placement in zip(names, placements, strict=True):
        if name and name not in free:
            yield name, placement


def _sides(op: Op, strategy: Strategy, free: frozenset[str]) -> tuple[Iterator[tuple[str, Placement]], ...]:
    """Return what an op reads and what it makes, with placements."""
    return _placed(op.inputs, strategy.inputs, free), _placed(op.outputs, strategy.outputs, free)


def _times(strategy: Strategy, factor: int) -> Strategy:
    """Return a strategy with `factor` times the chunks."""

    def scaled(placements: Placements) -> Placements:
        return tuple(Shard(p.dim, p.chunks * factor) if isinstance(p, Shard) else p for p in placements)

    return replace(strategy, inputs=scaled(strategy.inputs), outputs=scaled(strategy.outputs))


def _reductions(ops: Sequence[Op], folded: Folded, rules: Rules, classes: _Classes) -> dict[str, str]:
    """Return by class what the terms of its values are put together by."""
    found: dict[str, str] = {}
    leaving: dict[int, list[Strategy]] = {}  # by rule, the strategies that leave terms
    for op in ops:
        rule = rules.of(op)
        if id(rule) not in leaving:
            leaving[id(rule)] = [each for each in rule.strategies if any(isinstance(p, Partial) for p in each.outputs)]
        offered: dict[str, set[str]] = {}
        for strategy in leaving[id(rule)]:
            read, made = (
                [(classes.of(name), placement.reduce) for name, placement in placed if isinstance(placement, Partial)]
                for placed in _sides(op, strategy, folded.free)
            )
            in_place = classes.sums & {name for name, _ in made}  # terms are added to terms
            if all(found.get(name) == reduce for name, reduce in read if name in found or name not in in_place):
                for name, reduce in made:
                    offered.setdefault(name, set()).add(reduce)
        for name, reductions in offered.items():
            found.setdefault(name, min(reductions, key=REDUCTIONS.index))
    return found


@dataclass(frozen=True, slots=True)
class _Lines:
    """The dims that strategies of one rule shard together, as (operand, dim), without operands that are free.

    Attributes:
        tied: Of strategies that hold block-cyclic too, each set once.
        asking: Of strategies that ask for chunks, with how many.
    """

    tied: tuple[tuple[tuple[int, int], ...], ...]
    asking: tuple[tuple[tuple[int, int, int], ...], ...]


def _lines(rule: Rule, places: Sequence[int]) -> _Lines:
    """Return the dims that strategies of a rule shard together.

    Args:
        rule: The rule.
        places: The operands that others place too.
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
    return _Lines(tuple(tied), tuple(asking))


def _chunks(ops: Sequence[Op], folded: Folded, rules: Rules, classes: _Classes) -> dict[Dim, int]:
    """Return the chunks of the dims that have more than one, by class and dim."""
    ties: _Union[Dim] = _Union()
    asking: list[list[tuple[Dim, int]]] = []
    known: dict[Hashable, _Lines] = {}
    for op in ops:
        rule, names = rules.of(op), (*op.inputs, *op.outputs)
        places = tuple(place for place, name in enumerate(names) if name and name not in folded.free)
        if (id(rule), places) not in known:
            known[id(rule), places] = _lines(rule, places)
        lines = known[id(rule), places]
        owners = [classes.of(name) if name else "" for name in names]
        for dims in lines.tied:
            for place, dim in dims:
                ties.join((owners[dims[0][0]], dims[0][1]), (owners[place], dim))
        asking += [[((owners[place], dim), chunks) for place, dim, chunks in dims] for dims in lines.asking]
    members = ties.sets()
    values = folded.graph.values

    def bears(dim: Dim, chunks: int) -> bool:
        """Whether all dims tied to this one can be cut in so many chunks and still be shared by two devices."""
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
            fits &= decided[root] == chunks if root in decided else chunks == 1 or bears(root, chunks)
        if fits:
            decided |= asked
    return {dim: count for root, count in decided.items() if count > 1 for dim in members.get(root, [root])}

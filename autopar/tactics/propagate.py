"""Propagation: what follows from the decisions so far, by the discovered rules and nothing else.

An op that has a tensor split by an axis follows the one strategy that agrees with all its tensors that are split; what
this strategy splits besides is split from then on, wherever it goes. No strategy agrees if its tensors were split in
ways that do not go together: then the decisions that came first win, and the conflict is noted. If several agree, the
op waits for more to be decided.

A strategy that leaves terms to be summed is only followed if something other than a parameter is split: a parameter
alone that lies in shards is gathered before use, as in ZeRO.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.discover import Strategy
from autopar.discover.per_device import takes_own_mean
from autopar.ir.rings import RINGS
from autopar.sharding import Placement, Shard
from autopar.tactics.state import PINNED, Decided, OpKey, State, is_partial, is_whole, sharded_dim
from autopar.tactics.terms import leaves_terms, passes_terms


@dataclass(frozen=True, slots=True)
class Conflict:
    """Decisions that do not go together in an op.

    Attributes:
        op: Its name.
        axis: Name of the mesh axis.
        winner: The value that was split first, and along which dim.
        loser: The value that is put together or exchanged before the op, or exchanged after it.
    """

    op: str
    axis: str
    winner: tuple[str, int]
    loser: tuple[str, int]

    def __str__(self) -> str:
        (won, won_dim), (lost, lost_dim) = self.winner, self.loser
        return (
            f"{self.op}: {lost} is split along dim {lost_dim} over {self.axis}, which does not go with "
            f"dim {won_dim} of {won}, split earlier"
        )


@dataclass(frozen=True, slots=True)
class _Known:
    """A tensor of an op of which it is known how it is split."""

    tensor: int
    name: str
    decided: Decided
    is_parameter: bool


@dataclass(eq=False)
class _Passing:
    """The ops that pass terms on over an axis before anything is propagated.

    Most of what is propagated is a parameter or what the optimizer keeps of it, for which nobody asks that: it is found
    once it is asked for, as all ops have to be looked at.

    Attributes:
        state: What is decided.
        axis: Index of the mesh axis.
        since: Ops decided on the axis since.
    """

    state: State
    axis: int
    since: list[OpKey] = field(default_factory=list)

    @cached_property
    def ops(self) -> Mapping[OpKey, int]:
        """These ops, with the number of their strategy."""
        return passes_terms(self.state.without(self.since, self.axis), self.axis)


def propagate(state: State, axis: int, changed: Iterable[str], tactic: int) -> list[Conflict]:
    """Decide what follows from what has changed on an axis; return the conflicts met.

    Args:
        state: What is decided; added to.
        axis: Index of the mesh axis.
        changed: Classes that have been split or pinned.
        tactic: Number of the tactic that changed them.
    """
    topology = state.topology
    conflicts: list[Conflict] = []
    # Ops are looked at in the order of the graph, so that the forward decides before the backward does.
    waiting: list[OpKey] = []
    listed: set[OpKey] = set()

    def wake(name: str) -> None:
        cls = topology.of(name)
        for key, _ in (*topology.makers.get(cls, ()), *topology.readers.get(cls, ())):
            if key not in listed and axis not in state.chosen.get(key, {}):
                listed.add(key)
                heapq.heappush(waiting, key)

    passing = _Passing(state, axis)
    for name in changed:
        conflicts += _late(state, name, axis)
        wake(name)
    while waiting:
        key = heapq.heappop(waiting)
        listed.discard(key)
        follow = _follow(state, key, axis, passing)
        if follow is None:
            continue
        number, conflict = follow
        if conflict is not None:
            conflicts.append(conflict)
        if number is None:
            continue
        state.chosen.setdefault(key, {})[axis] = number
        passing.since.append(key)
        op = topology.ops[key]
        for name, placement, _ in placed(state, key, topology.strategies(key)[number]):
            dim = sharded_dim(placement)
            if dim is not None and topology.is_placed(op, name) and state.decide(name, axis, dim, tactic):
                conflicts += _late(state, name, axis)
                wake(name)
    return conflicts


def _late(state: State, name: str, axis: int) -> list[Conflict]:
    """Return where a value that has just been split meets ops that had been decided before, and not for this split.

    A parameter that is gathered before use is no conflict.
    """
    topology, cls = state.topology, state.topology.of(name)
    decided = state.split(cls, axis)
    if decided is None or decided.dim == PINNED or cls in topology.trained:
        return []
    found = []
    places = [(key, slot, False) for key, slot in topology.readers.get(cls, ())]
    places += [(key, slot, True) for key, slot in topology.makers.get(cls, ())]
    for key, slot, is_output in places:
        strategy = state.strategy(key, axis)
        if strategy is None:
            continue
        own = (strategy.outputs if is_output else strategy.inputs)[slot]
        # What an op leaves whole or in terms is sliced or scattered.
        if (isinstance(own, Shard) or not is_output) and sharded_dim(own) != decided.dim:
            op = topology.ops[key]
            known = [(item.name, item.decided.dim) for item in _known(state, key, axis) if _splits(strategy, item)]
            dims = ((other, sharded_dim(placement)) for other, placement, _ in placed(state, key, strategy))
            known += [(other, dim) for other, dim in dims if dim is not None]
            if not known:  # it was decided that the op splits nothing: what it reads is gathered
                continue
            value = (op.outputs if is_output else op.inputs)[slot]
            found.append(Conflict(op.name, topology.mesh.axes[axis].name, known[0], (value, decided.dim)))
    return found


def placed(state: State, key: OpKey, strategy: Strategy) -> Iterable[tuple[str, Placement, bool]]:
    """Yield name, placement and whether it is an output of every tensor of an op under a strategy."""
    op = state.topology.ops[key]
    for names, placements, is_output in ((op.inputs, strategy.inputs, False), (op.outputs, strategy.outputs, True)):
        for name, placement in zip(names, placements, strict=True):
            if name:
                yield name, placement, is_output


def _known(state: State, key: OpKey, axis: int) -> list[_Known]:
    """Return the tensors of an op that are split or pinned, in the order in which that was decided."""
    topology, op = state.topology, state.topology.ops[key]
    found = []
    names = (*op.inputs, *op.outputs)
    for tensor, name in enumerate(names):
        if not name or (tensor < len(op.inputs) and not topology.is_placed(op, name)):
            continue
        decided = state.split(name, axis)
        if decided is not None:
            found.append(_Known(tensor, name, decided, topology.of(name) in topology.trained))
    return sorted(found, key=lambda known: known.decided.order)


def _follow(state: State, key: OpKey, axis: int, passing: _Passing) -> tuple[int | None, Conflict | None] | None:
    """Return the strategy an op has to follow, if there is exactly one, and the conflict that was met on the way."""
    known = _known(state, key, axis)
    if all(item.decided.dim == PINNED for item in known) or _adds_terms(state, key, axis, known, passing):
        return None
    possible, split, conflict = _agree(state, key, axis, known)
    if split and not possible and all(item.is_parameter for item in split):
        # What is gathered before use does not stand in the way of anything else.
        others = [item for item in known if not item.is_parameter]
        possible, split, conflict = _agree(state, key, axis, others)
    if not split:
        return None
    possible = _plainest(state.topology.strategies(key), possible)
    return (possible[0] if len(possible) == 1 else None), conflict


def _agree(
    state: State, key: OpKey, axis: int, known: Sequence[_Known]
) -> tuple[list[int], list[_Known], Conflict | None]:
    """Return the strategies that go with what is known, what of it they go with, and the first thing they do not."""
    strategies = state.topology.strategies(key)
    chosen = state.chosen.get(key, {})
    no_ring = state.context.get(axis) == "gather"
    possible = [
        int(number)
        for number in state.topology.possible(key, chosen, axis)
        if _follows(strategies[number]) and not (no_ring and is_ring(strategies[number]))
    ]
    split: list[_Known] = []
    conflict = None
    for item in known:
        left = [number for number in possible if _agrees(strategies[number], item)]
        if left:
            possible = left
            if item.decided.dim != PINNED:
                split.append(item)
        elif conflict is None and split and item.decided.dim != PINNED:
            conflict = Conflict(
                state.topology.ops[key].name,
                state.topology.mesh.axes[axis].name,
                (split[0].name, split[0].decided.dim),
                (item.name, item.decided.dim),
            )
    possible = [number for number in possible if any(_splits(strategies[number], item) for item in split)]
    if all(item.is_parameter for item in split):
        possible = [number for number in possible if not _leaves_terms(strategies[number])]
    return possible, split, conflict


def _adds_terms(state: State, key: OpKey, axis: int, known: list[_Known], passing: _Passing) -> bool:
    """Whether an op reads nothing but terms, which it can add before they are reduced."""
    topology, op = state.topology, state.topology.ops[key]
    if any(item.tensor < len(op.inputs) for item in known):
        return False
    inputs = [name for name in op.inputs if name and topology.is_placed(op, name)]
    if len(inputs) < 2:
        return False
    makers = [topology.makers.get(topology.of(name), ()) for name in inputs]
    if not all(makers):
        return False
    made = [maker for found in makers for maker in found]
    return all(_may_leave_terms(state, maker, slot, axis) for maker, slot in made) and all(
        leaves_terms(state, maker, slot, axis, passing.ops) for maker, slot in made
    )


def _may_leave_terms(state: State, key: OpKey, slot: int, axis: int) -> bool:
    """Whether an op leaves terms as an output, or may pass them on as long as nothing else is decided."""
    strategy = state.strategy(key, axis)
    return bool(state.topology.passing(key)) if strategy is None else is_partial(strategy.outputs[slot])


def _follows(strategy: Strategy) -> bool:
    """Whether a strategy splits something and takes no terms: those are passed on in `terms.py`.

    A device's own terms of a mean over the batch go with its samples.
    """
    placements = (*strategy.inputs, *strategy.outputs)
    takes_terms = any(is_partial(p) for p in strategy.inputs) and not takes_own_mean(strategy)
    return any(not is_whole(p) for p in placements) and not takes_terms


def _leaves_terms(strategy: Strategy) -> bool:
    return any(is_partial(placement) for placement in strategy.outputs)


def _agrees(strategy: Strategy, item: _Known) -> bool:
    """Whether a strategy goes with how a tensor lies.

    Terms can become any split afterwards. A pinned input can be sliced by the op; a pinned output cannot be split.
    """
    is_output = item.tensor >= len(strategy.inputs)
    placement = (*strategy.inputs, *strategy.outputs)[item.tensor]
    if item.decided.dim == PINNED:
        return not (is_output and shards(placement))
    return _splits(strategy, item) or (is_output and is_partial(placement))


def _splits(strategy: Strategy, item: _Known) -> bool:
    """Whether a strategy splits a tensor as it is split."""
    return sharded_dim((*strategy.inputs, *strategy.outputs)[item.tensor]) == item.decided.dim


def _plainest(strategies: Sequence[Strategy], possible: Sequence[int]) -> list[int]:
    """Return the strategies among equals that need no rows of neighbours and no other op than the op itself.

    Of rings alone these are those that split the most: a mask by its rows, and not whole.
    """
    plain = [number for number in possible if not strategies[number].halos and strategies[number].local is None]
    if not plain and possible and all(is_ring(strategies[number]) for number in possible):
        split = {number: sum(map(shards, strategies[number].inputs)) for number in possible}
        return [number for number in possible if split[number] == max(split.values())]
    return list(plain or possible)


def is_ring(strategy: Strategy) -> bool:
    """Whether devices run an op together, passing blocks round."""
    return strategy.local is not None and strategy.local.kind in RINGS


def shards(placement: Placement) -> bool:
    """Whether a placement splits a dim."""
    return isinstance(placement, Shard)

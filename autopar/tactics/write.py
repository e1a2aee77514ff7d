"""Writing down what has been decided: the placements of a plan, block by block.

What no tactic reached is replicated. Terms are reduced where they are made, to the split of their class if it has one,
unless all readers pass them on.
"""

from collections.abc import Mapping, Sequence

from autopar.discover import Strategy
from autopar.folding.fold import BlockKind, Source
from autopar.formulate.op_placement import op_placement
from autopar.ir.graph import Op, Phase, Role
from autopar.plan import BlockPlan, OpPlacement, ValuePlacement
from autopar.sharding import Placement, Placements, Replicate, Shard, format_placements, uneven
from autopar.tactics.state import OpKey, State, is_partial
from autopar.tactics.terms import left, passes_terms

_PHASES = {
    Phase.FORWARD: "forward",
    Phase.LOSS: "forward",
    Phase.BACKWARD: "backward",
    Phase.UPDATE: "update",
}


class Writer:
    """Placements of everything under a state.

    Attributes:
        state: What has been decided.
        passing: Per axis: the ops that pass terms on, with their strategy.
    """

    def __init__(self, state: State) -> None:
        self.state, self.topology = state, state.topology
        self.passing: Sequence[Mapping[OpKey, int]] = [
            passes_terms(state, axis) for axis in range(len(self.topology.mesh.axes))
        ]

    def by_axis(self, key: OpKey) -> tuple[Strategy, ...]:
        """Return what an op does on each axis."""
        strategies, chosen = self.topology.strategies(key), self.state.chosen.get(key, {})
        return tuple(strategies[chosen.get(axis, passing.get(key, 0))] for axis, passing in enumerate(self.passing))

    def of_class(self, name: str) -> Placements:
        """Return how a class lies where no op says otherwise: split, whole, or in terms that all its readers take."""
        exact = self.state.placed.get(self.topology.of(name))
        if exact is not None:
            return exact
        found: list[Placement] = []
        chunks = self.topology.meaning.chunks(name)
        for axis, passed in enumerate(self._passed(name)):
            decided = self.state.split(name, axis)
            if passed:
                key, slot = self.topology.makers[self.topology.of(name)][0]
                found.append(left(self.state, key, slot, axis, self.passing[axis]))
            elif decided is None or decided.dim < 0:
                found.append(Replicate())
            else:
                found.append(Shard(decided.dim, chunks[decided.dim]))
        return self._uneven(name, tuple(found))

    def _uneven(self, name: str, placements: Placements) -> Placements:
        """Return placements of a value with dims that are dealt out in uneven blocks marked."""
        return uneven(self.topology.folded.graph.values[name].shape, placements, self.topology.mesh)

    def home(self, key: OpKey, slot: int) -> Placements:
        """Return how an op leaves an output."""
        found = tuple(strategy.outputs[slot] for strategy in self.by_axis(key))
        return self._uneven(self.topology.ops[key].outputs[slot], found)

    def reduced(self, key: OpKey, slot: int) -> Placements:
        """Return how an output lies once the terms nobody passes on are reduced."""
        name = self.topology.ops[key].outputs[slot]
        home, whole = self.home(key, slot), self.of_class(name)
        return tuple(
            whole[axis] if is_partial(placement) and not passed else placement
            for axis, (placement, passed) in enumerate(zip(home, self._passed(name), strict=True))
        )

    def _passed(self, name: str) -> list[bool]:
        """Return for each axis whether those who read a value take it in terms."""
        readers = self.topology.readers.get(self.topology.of(name), ())
        return [
            any(reader in passing or self._takes_terms(reader, slot, axis) for reader, slot in readers)
            for axis, passing in enumerate(self.passing)
        ]

    def _takes_terms(self, key: OpKey, slot: int, axis: int) -> bool:
        strategy = self.state.strategy(key, axis)
        return strategy is not None and is_partial(strategy.inputs[slot])

    def blocks(self) -> tuple[BlockPlan, ...]:
        """Return the placements of every distinct block."""
        folded = self.topology.folded
        owners = {state.input: state for state in folded.graph.states if state.role is Role.PARAMETER}
        kinds_of = {parameter.value.name: parameter.producer.kind for parameter in folded.parameters}
        departing: dict[int, list[ValuePlacement]] = {kind.id: [] for kind in folded.kinds}
        for cls in self.topology.boundaries:
            for (kind_id, position), slot in self.topology.makers[cls]:
                name = folded.kinds[kind_id].ops[position].outputs[slot]
                departing[kind_id].append(ValuePlacement(name, format_placements(self.of_class(cls))))
        found = []
        for kind in folded.kinds:
            states: list[ValuePlacement] = []
            borrowed: list[ValuePlacement] = []
            for op in kind.ops:
                for name in op.inputs:
                    producer = folded.by_value.get(name)
                    if producer is None or producer.source is not Source.STATE or name not in owners:
                        continue
                    placement = ValuePlacement(name, format_placements(self.of_class(name)))
                    own = kinds_of.get(self.topology.of(name)) == kind.id
                    target = states if own else borrowed
                    if placement not in target:
                        target.append(placement)
            arrivals = [
                ValuePlacement(arrival.value, format_placements(self.of_class(arrival.value)))
                for arrival in kind.arrivals
            ]
            results = self._results(kind)
            found.append(
                BlockPlan(
                    kind=kind.id,
                    representative=kind.representative,
                    instances=kind.instances,
                    ops=tuple(self._ops(kind)),
                    states=tuple(states),
                    borrowed=tuple(borrowed),
                    arrivals=tuple(arrivals),
                    departures=tuple(departing[kind.id] + results),
                    copies=tuple(self._copies(kind)),
                )
            )
        return tuple(found)

    def _ops(self, kind: BlockKind) -> list[OpPlacement]:
        return [self._op((kind.id, position), op) for position, op in enumerate(kind.ops)]

    def _op(self, key: OpKey, op: Op) -> OpPlacement:
        """Return how an op runs."""
        topology = self.topology
        return op_placement(op, self.by_axis(key), topology.mesh, topology.folded.graph.values)

    def _results(self, kind: BlockKind) -> list[ValuePlacement]:
        """Return how results of the model leave it: in no terms."""
        results = frozenset(self.topology.folded.graph.outputs)
        if self.state.copies is not None:  # what is said exactly is all there is
            results = results & self.state.placed.keys() - self.topology.boundary_set
        return [
            ValuePlacement(
                name, format_placements(self.state.placed.get(name) or self.reduced((kind.id, position), slot))
            )
            for position, op in enumerate(kind.ops)
            for slot, name in enumerate(op.outputs)
            if name in results
        ]

    def _copies(self, kind: BlockKind) -> list[ValuePlacement]:
        """Return the reduced copies of what ops leave in terms, one per phase that reads it, or those said exactly."""
        if self.state.copies is not None:
            return [
                ValuePlacement(name, format_placements(placements))
                for name, placements in self.state.copies.items()
                if name.rpartition("@")[2].partition("/")[0] == str(kind.id)
            ]
        phases: dict[str, dict[str, int]] = {}
        for op in kind.ops:
            for name in op.inputs:
                counts = phases.setdefault(name, {})
                counts[_PHASES[op.phase]] = counts.get(_PHASES[op.phase], 0) + 1
        found = []
        for position, op in enumerate(kind.ops):
            for slot, name in enumerate(op.outputs):
                key = (kind.id, position)
                if not name or not any(map(is_partial, self.home(key, slot))):
                    continue
                reduced = self.reduced(key, slot)
                if reduced != self.home(key, slot):
                    found += [
                        ValuePlacement(f"{name}@{kind.id}/{phase}", format_placements(reduced))
                        for phase in phases.get(name, ())
                    ]
        return found

"""Keys and values of attention whose query heads are split over more devices than there are key heads.

They are copied, as in Megatron-LM: every device makes all of them from whole inputs, and takes the key heads of its own
query heads. Their gradients are terms, one per device. These stay terms through the projections, so that they cost no
collective of their own: gradients of the projections' parameters are summed once per step, and those of the inputs
together with the terms that the query heads leave.
"""

from autopar.discover import Strategy
from autopar.ir.graph import Phase
from autopar.sharding import Partial
from autopar.tactics.state import OpKey, State, is_whole

_COPY = 0
"""Number of the strategy by which an op does everything everywhere."""
_SUM = Partial("sum")


def copy_key_heads(state: State, axis: int) -> None:
    """Decide how keys, values and their gradients are made where attention selects key heads on an axis."""
    for key, op in state.topology.ops.items():
        strategy = state.strategy(key, axis)
        if strategy is None or strategy.local is None or strategy.local.fewer is None:
            continue
        if op.phase is Phase.BACKWARD:
            _keep_terms(state, key, axis, strategy)
        else:
            _copy_inputs(state, key, axis, strategy)


def _copy_inputs(state: State, key: OpKey, axis: int, strategy: Strategy) -> None:
    """Copy what makes the inputs that a strategy takes whole, back to products with parameters, these included."""
    topology = state.topology
    op = topology.ops[key]
    pending = [
        name
        for name, placement in zip(op.inputs, strategy.inputs, strict=True)
        if name and topology.is_placed(op, name) and is_whole(placement)
    ]
    while pending:
        cls = topology.of(pending.pop())
        if cls in topology.boundary_set or state.split(cls, axis) is not None:
            continue
        for maker, _ in topology.makers.get(cls, ()):
            made_by = topology.ops[maker]
            if axis in state.chosen.get(maker, {}) or made_by.phase is Phase.UPDATE:
                continue
            state.chosen.setdefault(maker, {})[axis] = _COPY
            names = [name for name in made_by.inputs if name and topology.is_placed(made_by, name)]
            matrices = [name for name in names if topology.of(name) in topology.trained and topology.rank(name) > 1]
            pending += [] if matrices else names


def _keep_terms(state: State, key: OpKey, axis: int, strategy: Strategy) -> None:
    """Let the ops that read terms of a strategy leave terms, as far as their other inputs are whole."""
    topology = state.topology
    outputs = zip(topology.ops[key].outputs, strategy.outputs, strict=True)
    pending = [name for name, placement in outputs if name and placement == _SUM]
    while pending:
        readers = topology.readers.get(topology.of(pending.pop()), ())
        found = [_leaving_terms(state, reader, slot, axis) for reader, slot in readers]
        for (reader, _), number in zip(readers, found, strict=True):
            if number is not None and None not in found:
                state.chosen.setdefault(reader, {})[axis] = number
                pending += [name for name in topology.ops[reader].outputs if name]


def _leaving_terms(state: State, key: OpKey, slot: int, axis: int) -> int | None:
    """Return the strategy by which an op takes one input in terms and all others whole, and leaves terms."""
    topology, op = state.topology, state.topology.ops[key]
    if axis in state.chosen.get(key, {}) or op.phase is Phase.UPDATE:
        return None
    for number in topology.possible(key, state.chosen.get(key, {}), axis).tolist():
        strategy = topology.strategies(key)[number]
        others = [placement for other, placement in enumerate(strategy.inputs) if other != slot]
        terms = {strategy.inputs[slot], *strategy.outputs}
        if terms == {_SUM} and all(map(is_whole, others)):
            return int(number)
    return None

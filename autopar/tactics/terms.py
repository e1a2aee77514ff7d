"""Terms: which ops pass on values that are terms of a sum instead of having them reduced first.

`partial + partial = partial`: the gradients of a tied embedding are added before they are reduced, sums over
microbatches before they are. An op passes terms on if it can, has nothing but terms as inputs, and so do all others
that read these inputs: if one of them needs the reduced value, reducing it once serves all. Nor does an op of the
forward pass on terms that the backward reads reduced: they would be reduced in both.
"""

from collections.abc import Mapping

from autopar.ir.graph import Phase
from autopar.sharding import Placement
from autopar.tactics.state import OpKey, State, is_partial


def passes_terms(state: State, axis: int) -> dict[OpKey, int]:
    """Return the ops that pass terms on over an axis, with the number of their strategy."""
    topology = state.topology
    candidates: dict[OpKey, int] = {}
    for key, op in topology.ops.items():
        if op.phase is Phase.UPDATE or axis in state.chosen.get(key, {}):
            continue
        number = _passing(state, key, axis)
        if number is not None:
            candidates[key] = number
    while True:
        dropped = [key for key in candidates if not _stands(state, key, axis, candidates)]
        if not dropped:
            return candidates
        for key in dropped:
            del candidates[key]


def _passing(state: State, key: OpKey, axis: int) -> int | None:
    """Return the strategy by which an op takes nothing but terms and leaves terms."""
    passing = state.topology.passing(key)
    if not passing:
        return None
    possible = {*state.topology.possible(key, state.chosen.get(key, {}), axis).tolist()}
    return next((number for number in passing if number in possible), None)


def _stands(state: State, key: OpKey, axis: int, candidates: dict[OpKey, int]) -> bool:
    """Whether all inputs of a candidate are terms, wanted as such by all that read them."""
    topology, op = state.topology, state.topology.ops[key]
    own = {topology.of(name) for name in op.outputs if name}
    for slot, name in enumerate(op.inputs):
        cls = topology.of(name) if name else ""
        if not name or not topology.is_placed(op, name) or (cls in own and cls not in topology.boundary_set):
            continue  # the sum so far is what the op itself made of the microbatch before, not of the block before
        makers = topology.makers.get(cls, [])
        taken = topology.strategies(key)[candidates[key]].inputs[slot]
        if not makers or not all(left(state, maker, output, axis, candidates) == taken for maker, output in makers):
            return False
        if any(
            reader not in candidates
            for reader, _ in topology.readers[cls]
            if topology.ops[reader].phase is not Phase.UPDATE
        ):
            return False
    return not any(
        topology.ops[reader].phase is Phase.BACKWARD and op.phase is not Phase.BACKWARD and reader not in candidates
        for name in own
        for reader, _ in topology.readers.get(name, ())
    )


def leaves_terms(state: State, key: OpKey, slot: int, axis: int, passing: Mapping[OpKey, int]) -> bool:
    """Whether an op leaves terms as an output on an axis."""
    return is_partial(left(state, key, slot, axis, passing))


def left(state: State, key: OpKey, slot: int, axis: int, passing: Mapping[OpKey, int]) -> Placement:
    """Return how an op leaves an output on an axis: whole if nothing is decided."""
    number = state.chosen.get(key, {}).get(axis, passing.get(key, 0))
    return state.topology.strategies(key)[number].outputs[slot]

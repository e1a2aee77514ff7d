"""Why parameters still lie whole on every device."""

from dataclasses import dataclass

from autopar.tactics.state import PINNED, State


@dataclass(frozen=True, slots=True)
class Unsplit:
    """A parameter that a mesh axis does not split.

    Attributes:
        value: Its name.
        axis: Name of the mesh axis.
        reason: Why.
    """

    value: str
    axis: str
    reason: str


def unsplit(state: State) -> tuple[Unsplit, ...]:
    """Return the parameters that axes do not split, and why."""
    topology = state.topology
    found = []
    for parameter in topology.folded.parameters:
        name = parameter.value.name
        for index, axis in enumerate(topology.mesh.axes):
            decided = state.split(name, index)
            if decided is None or decided.dim == PINNED:
                found.append(Unsplit(name, axis.name, _reason(state, name, index)))
    return tuple(found)


def _reason(state: State, name: str, axis: int) -> str:
    topology = state.topology
    if state.split(name, axis) is not None:
        return "pinned"
    if not any(state.divides(name, dim, axis) for dim in range(topology.rank(name))):
        size = topology.mesh.axes[axis].size
        return f"no dim of {topology.folded.graph.values[name].shape} can be divided by {size} more"
    readers = [key for key, _ in topology.readers.get(name, ())]
    if readers and all(axis in state.chosen.get(key, {}) for key in readers):
        return "the ops that read it need all of it"
    return "no tactic reached it"

"""The interface of each distinct block: the values it hands to its neighbours, and their names in every instance.

All instances of a kind share one interface, so output i of a block must be input i of every successor. A value is
passed by position if in every instance of every kind involved it is made in one block and read in the neighbouring one.
All other values (skip connections, the gradient of a tied embedding, values all layers read) are *far*: the block that
makes a far value exports it, and its readers find it by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from autopar.folding.fold import Folded
from autopar.ir.blocks import instance_ops
from autopar.ir.graph import Phase


@dataclass(frozen=True, slots=True)
class HandOver:
    """Values that enter and leave a kind, named as in its representative.

    Attributes:
        forward_in: Received from the previous block in the forward pass, by position.
        forward_out: Sent to the next block in the forward pass, by position.
        backward_in: Received from the next block in the backward pass, by position.
        backward_out: Sent to the previous block in the backward pass, by position.
        far: Made here and read by blocks that do not receive it by position.
    """

    forward_in: tuple[str, ...]
    forward_out: tuple[str, ...]
    backward_in: tuple[str, ...]
    backward_out: tuple[str, ...]
    far: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Port:
    """A value that enters or leaves a kind, named as in the representative."""

    kind: int
    value: str
    leaves: bool


def instance_names(folded: Folded) -> tuple[Mapping[str, str], ...]:
    """Return, per block of the chain, a map from value names in its kind's representative to names in the instance.

    Names shared by instance and representative (a tied parameter, the model's inputs) are included.
    """
    return _instance_names(folded.pattern)


@lru_cache(maxsize=4)
def _instance_names(folded: Folded) -> tuple[Mapping[str, str], ...]:
    names: list[Mapping[str, str]] = []
    for kind, ops in zip(folded.chain, instance_ops(folded.graph), strict=True):
        known: dict[str, str] = {}
        for model, own in zip(folded.kinds[kind].ops, ops, strict=True):
            for name, instance in zip((*model.inputs, *model.outputs), (*own.inputs, *own.outputs), strict=True):
                if name:
                    same = known.setdefault(name, instance)
                    assert same == instance, f"{name} of kind {kind} is both {same} and {instance} in one block"
        names.append(known)
    return tuple(names)


def hand_overs(folded: Folded) -> Mapping[int, HandOver]:
    """Return the interface of every kind."""
    return _hand_overs(folded.pattern)


def is_far(folded: Folded, kind: int, value: str) -> bool:
    """Return whether a value that reaches a kind from another block is passed by name, hence available early."""
    own = hand_overs(folded)[kind]
    return value not in own.forward_in and value not in own.backward_in


@lru_cache(maxsize=16)
def _hand_overs(folded: Folded) -> Mapping[int, HandOver]:
    names = instance_names(folded)
    home = {value: op.block for op in folded.graph.ops for value in op.outputs if value}
    readers: dict[str, dict[int, _Port]] = {}  # value -> other blocks that read it, with the ports it enters by
    for block, known in enumerate(names):
        for name, value in known.items():
            if home.get(value, block) != block:
                readers.setdefault(value, {})[block] = _Port(folded.chain[block], name, leaves=False)

    made: dict[str, tuple[int, _Port]] = {}  # value -> its block, with the port it leaves by
    for kind in folded.kinds:
        for model in (value for op in kind.ops for value in op.outputs if value):
            instances = [(block, names[block][model]) for block in kind.instances]
            if any(value in readers for _, value in instances):
                port = _Port(kind.id, model, leaves=True)
                made.update((value, (block, port)) for block, value in instances)

    channels = _Channels()
    is_backward: dict[_Port, bool] = {}
    for value, (block, port) in made.items():
        is_backward[port] = folded.producers[value].phase is Phase.BACKWARD
        near = block - 1 if is_backward[port] else block + 1
        entered = readers.get(value, {})
        for reader, entry in entered.items():
            is_backward[entry] = is_backward[port]
            if reader == near:
                channels.connect(port, entry)
            else:
                channels.reject(entry)
        if near not in entered:
            channels.reject(port)

    by_position = channels.by_position()
    sides: dict[tuple[int, bool, bool], dict[int, str]] = {}
    for port, channel in by_position.items():
        sides.setdefault((port.kind, port.leaves, is_backward[port]), {})[channel] = port.value
    far: dict[int, dict[str, None]] = {kind.id: {} for kind in folded.kinds}
    for value, (_, port) in made.items():
        if any(entry not in by_position for entry in readers.get(value, {}).values()):
            far[port.kind][port.value] = None

    def side(kind: int, *, leaves: bool, backward: bool) -> tuple[str, ...]:
        return tuple(name for _, name in sorted(sides.get((kind, leaves, backward), {}).items()))

    return {
        kind.id: HandOver(
            forward_in=side(kind.id, leaves=False, backward=False),
            forward_out=side(kind.id, leaves=True, backward=False),
            backward_in=side(kind.id, leaves=False, backward=True),
            backward_out=side(kind.id, leaves=True, backward=True),
            far=tuple(far[kind.id]),
        )
        for kind in folded.kinds
    }


class _Channels:
    """Union-find over ports: ports between which some instance passes a value share a position."""

    def __init__(self) -> None:
        self._parent: dict[_Port, _Port] = {}
        self._refused: set[_Port] = set()

    def _root(self, port: _Port) -> _Port:
        parent = self._parent.setdefault(port, port)
        while parent != self._parent[parent]:
            parent = self._parent[parent]
        return parent

    def connect(self, first: _Port, second: _Port) -> None:
        """Record that a value passes from one port to the other."""
        self._parent[self._root(second)] = self._root(first)

    def reject(self, port: _Port) -> None:
        """Record that a value passes through a port from or to a block that is no neighbour."""
        self._root(port)
        self._refused.add(port)

    def by_position(self) -> dict[_Port, int]:
        """Return the channel number of each port that values can pass by position.

        A channel has at most one port per kind and side: a kind cannot send or receive two values at one position.
        """
        numbers: dict[_Port, int] = {}
        ports: dict[int, list[_Port]] = {}
        for port in self._parent:
            number = numbers.setdefault(self._root(port), len(numbers))
            ports.setdefault(number, []).append(port)
        kept: dict[_Port, int] = {}
        for number, members in ports.items():
            distinct = {(port.kind, port.leaves) for port in members}
            if len(distinct) == len(members) and self._refused.isdisjoint(members):
                kept.update((port, number) for port in members)
        return kept

"""Changes of placement: the cheapest sequence of collectives between any two placements of a tensor.

One move changes the placement on one mesh axis (bytes are those of the larger side on one device):

    R -> S(d)      slice           free
    S(d) -> R      all_gather      output
    S(d) -> S(e)   all_to_all      input
    P -> R         all_reduce      input
    P -> S(d)      reduce_scatter  input

A dim that may be dealt out in uneven blocks (a vocabulary) lies so on one axis alone, and never moves to another dim
directly: blocks are joined first. The largest block counts. Nothing becomes P, and what a P stands for (a sum, a
maximum) makes no difference. A dim in chunks moves like any other, if every chunk can be split; its number of chunks
never changes. A dim split over several axes is split by the major axis first, so a move may split or join a dim on an
axis only while no later axis splits the same dim. Cheapest paths over all placements that fit the tensor are found by
Floyd and Warshall's algorithm.
"""

from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from autopar.cost.arrays import FloatArray, IntArray
from autopar.cost.collectives import Collective, leaves_node
from autopar.cost.model import CostModel
from autopar.cost.overlap import Bucketed, Carried
from autopar.cost.placement_loops import shortened
from autopar.errors import ShardingError
from autopar.ir.routing import Routed, Routing
from autopar.sharding import Axis, Mesh, Partial, Placement, Placements, Replicate, Shard, format_placements

# Codes of a placement on one axis: 0 is R, 1 is P, d + 2 is S(d).
_REPLICATE, _PARTIAL, _SHARD = 0, 1, 2
_EXPERTS = _SHARD
"""Code of a split of the experts of rows, which are dim 0."""


@dataclass(frozen=True, slots=True)
class Move:
    """One step of a reshard: the placement changes on one mesh axis.

    Attributes:
        collective: What does it; None for a slice, which is local and free.
        axis: Index of the mesh axis.
        source: Placement on that axis before.
        target: Placement on that axis after.
        nbytes: Bytes of the larger side on one device; 0 for a slice.
        seconds: What it costs.
        routed: Of rows of experts, which of these the tokens chose.
    """

    collective: Collective | None
    axis: int
    source: Placement
    target: Placement
    nbytes: float
    seconds: float
    routed: Routed | None = None

    def __str__(self) -> str:
        return f"{self.collective or 'slice'}[{self.axis}] {self.source}->{self.target}"


@dataclass(frozen=True, slots=True)
class Share:
    """What a tensor pays of collectives in which it travels with others.

    With T the seconds of a collective by its bytes:

        seconds(S) = (T(parts S) - T(0)) / parts + latency T(0)

    Attributes:
        parts: Bytes of all that travels over those of the tensor.
        latency: Part of the latency that the tensor pays.
    """

    parts: float = 1.0
    latency: float = 1.0

    def seconds(self, cost: CostModel | Carried, collective: Collective, nbytes: FloatArray, axis: Axis) -> FloatArray:
        """Compute the seconds a tensor with `nbytes` on a device pays for a collective it shares with other tensors."""
        seconds = cost.collective_seconds(collective, self.parts * nbytes, axis) / self.parts
        rest = self.latency - 1.0 / self.parts
        return seconds + rest * cost.collective_seconds(collective, np.zeros(1), axis) if rest else seconds


ALONE = Share()
"""A tensor that travels by itself."""


def _code(placement: Placement) -> int:
    match placement:
        case Replicate():
            return _REPLICATE
        case Partial():
            return _PARTIAL
        case Shard(dim):
            return dim + _SHARD


def _collective(source: int, target: int) -> Collective | None:
    if source == _REPLICATE:
        return None
    if source == _PARTIAL:
        return Collective.ALL_REDUCE if target == _REPLICATE else Collective.REDUCE_SCATTER
    return Collective.ALL_GATHER if target == _REPLICATE else Collective.ALL_TO_ALL


@dataclass(frozen=True, slots=True, eq=False)
class _Space:
    """All placements of tensors of one rank on meshes of one number of axes, and the moves between them.

    A state's number reads the codes of its axes as digits, major axis first.

    Attributes:
        codes: (states, axes) code per axis.
        moves: Per (axis, collective): source and target states of every move.
    """

    codes: IntArray
    moves: tuple[tuple[int, Collective | None, IntArray, IntArray], ...]


@lru_cache(maxsize=64)
def _space(rank: int, num_axes: int) -> _Space:
    base = rank + _SHARD
    codes = np.array(list(product(range(base), repeat=num_axes)), np.int64).reshape(base**num_axes, num_axes)
    moves: dict[tuple[int, Collective | None], list[tuple[int, int]]] = {}
    for state, row in enumerate(codes.tolist()):
        for axis, source in enumerate(row):
            later = set(row[axis + 1 :])
            for target in range(base):
                if target in (source, _PARTIAL) or {code for code in (source, target) if code >= _SHARD} & later:
                    continue
                reached = state + (target - source) * base ** (num_axes - 1 - axis)
                moves.setdefault((axis, _collective(source, target)), []).append((state, reached))
    arrays = [(key, np.array(pairs, np.int64)) for key, pairs in moves.items()]
    return _Space(codes, tuple((axis, collective, pairs[:, 0], pairs[:, 1]) for (axis, collective), pairs in arrays))


@dataclass(frozen=True, slots=True, eq=False)
class Reshards:
    """The cheapest ways between all placements of one tensor.

    States are numbered alike for all tensors of a rank on a mesh (`index`); ways are known between those that fit this
    tensor, which are few on meshes of many devices. All others share the last row and column of `seconds`, at infinite
    distance of everything.

    Attributes:
        shape: Global shape of the tensor.
        mesh: The devices.
        chunks: Per dim, in how many chunks it is cut before it is sharded.
        places: (states,) row and column of each state.
        seconds: Seconds from row to column; infinity where there is no way.
        outside: How many of them a link between nodes is busy; 0 where there is no way.
        routing: Of rows of experts, which of these the tokens chose.
    """

    shape: tuple[int, ...]
    mesh: Mesh
    chunks: tuple[int, ...]
    places: IntArray
    seconds: FloatArray
    outside: FloatArray
    _hop: NDArray[np.int16]  # place of the first state on the way
    _states: IntArray  # by place
    _local: FloatArray  # bytes on a device, by place
    _from: tuple["Reshards", ...] = ()  # where moves cost by what they begin with, those that begin with so many bytes
    _size: IntArray | None = None  # and, by place, the number of the state's bytes among these
    routing: Routing | None = None
    _paths: dict[tuple[Placements, Placements], tuple[Move, ...]] = field(default_factory=dict, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of memory of all that is known."""
        own = self.places, self.seconds, self.outside, self._hop, self._states, self._local
        return sum(array.nbytes for array in own) + sum(each.nbytes for each in self._from)

    def between(self, sources: IntArray, targets: IntArray) -> FloatArray:
        """Return the seconds from states (rows) to states (columns), by their numbers."""
        return np.asarray(self.seconds[np.ix_(self.places[sources], self.places[targets])])

    def index(self, placements: Placements) -> int:
        """Return the row and column of a placement, the same for every tensor of this rank on this mesh.

        R is digit 0, P digit 1 and S(d) digit d + 2 of a number in base rank + 2, major axis first.

        Raises:
            ShardingError: If it has the wrong number of axes or a dim the tensor does not have.
        """
        codes = [_code(placement) for placement in placements]
        base = len(self.shape) + _SHARD
        if len(codes) != len(self.mesh.axes) or max(codes, default=0) >= base:
            raise ShardingError(
                f"{format_placements(placements)} is no placement of a {self.shape} tensor on mesh {self.mesh}"
            )
        state = 0
        for code in codes:
            state = state * base + code
        return state

    def matrix(self, sources: Sequence[Placements], targets: Sequence[Placements]) -> FloatArray:
        """Return the seconds of every reshard from `sources` (rows) to `targets` (columns), infinity if impossible.

        Raises:
            ShardingError: As for `index`.
        """
        rows, columns = (np.array([self.index(each) for each in some], np.int64) for some in (sources, targets))
        seconds = self.between(rows, columns)
        # The states do not tell sums from maxima. Nothing becomes partial, so a partial target asks for the very same
        # partial source.
        for column, target in enumerate(targets):
            for axis, placement in enumerate(target):
                if isinstance(placement, Partial):
                    seconds[[source[axis] != placement for source in sources], column] = np.inf
        return seconds

    def ways(self, sources: IntArray, targets: IntArray) -> tuple[NDArray[np.bool_], FloatArray]:
        """Return of the cheapest ways from states (rows) to states (columns) how they end and what is sent on them.

        Args:
            sources: Numbers of placements, as of `index`.
            targets: The same.

        Returns:
            Whether the last move is a collective, and the bytes one device hands to collectives in all; none and 0
            where there is no way or nothing to do.
        """
        codes = self._codes
        state, end = np.meshgrid(self.places[sources], self.places[targets], indexing="ij")
        moving = (state != end) & np.isfinite(self.seconds[state, end])
        collective, handed = np.zeros(state.shape, dtype=bool), np.zeros(state.shape)
        while moving.any():
            following = np.where(moving, self._hop[state, end], state)
            old = np.where(codes[state] != codes[following], codes[state], _REPLICATE).sum(axis=-1)
            collective = np.where(moving, old != _REPLICATE, collective)
            handed += np.where(moving & collective, self._local[state], 0.0)
            state = following
            moving &= state != end
        return collective, handed

    def seconds_of(
        self, collectives: Set[Collective], sources: IntArray, targets: IntArray, axes: Sequence[bool]
    ) -> FloatArray:
        """Return the seconds of some collectives on the cheapest ways from states (rows) to states (columns).

        Args:
            collectives: Which of them count.
            sources: Numbers of placements, as of `index`.
            targets: Numbers of placements, as of `index`.
            axes: By mesh axis, whether moves on it count.

        Returns:
            0 where there is no way.
        """
        assert self._size is None, "what travels in buckets is not told apart by collective"
        codes = self._codes
        state, end = np.meshgrid(self.places[sources], self.places[targets], indexing="ij")
        moving = (state != end) & np.isfinite(self.seconds[state, end])
        spent = np.zeros(state.shape)
        own = np.array([[_collective(old, new) in collectives for new in range(3)] for old in range(3)])
        while moving.any():
            following = np.where(moving, self._hop[state, end], state)
            changed = codes[state] != codes[following]
            counted = (changed & np.array(axes)).any(axis=-1)
            old = np.where(changed, codes[state], _REPLICATE).sum(axis=-1)
            new = np.where(changed, codes[following], _REPLICATE).sum(axis=-1)
            counted &= own[np.minimum(old, _SHARD), np.minimum(new, _SHARD)]
            spent += np.where(moving & counted, self.seconds[state, following], 0.0)
            state = following
            moving &= state != end
        return spent

    def path(self, source: Placements, target: Placements) -> tuple[Move, ...]:
        """Return the cheapest moves from one placement to another; none if they are equal.

        Raises:
            ShardingError: If there is no way, or as for `index`.
        """
        known = self._paths.get((source, target))
        if known is None:
            known = self._paths[source, target] = self._path(source, target)
        return known

    def _path(self, source: Placements, target: Placements) -> tuple[Move, ...]:
        """As `path`, looked up move by move."""
        if not np.isfinite(self.matrix([source], [target])[0, 0]):
            hint = "both must fit the tensor, and nothing can become partial again"
            names = f"{format_placements(source)} to {format_placements(target)}"
            raise ShardingError(f"a {self.shape} tensor on mesh {self.mesh} cannot go from {names}", hint=hint)
        state, end = int(self.places[self.index(source)]), int(self.places[self.index(target)])
        if self._size is not None:
            own = self._from[int(self._size[state])]
            return own.path(source, target)
        codes = self._codes
        current = list(source)
        moves = []
        while state != end:
            following = int(self._hop[state, end])
            axis = int(np.flatnonzero(codes[state] != codes[following])[0])
            old, new = int(codes[state, axis]), int(codes[following, axis])
            placement: Placement = Replicate()
            if new != _REPLICATE:
                dim = new - _SHARD
                is_dealt = self.shape[dim] % self.mesh.axes[axis].size > 0
                placement = Shard(dim, self.chunks[dim], self.shape[dim] if is_dealt else 0)
            collective = _collective(old, new)
            nbytes = float(max(self._local[state], self._local[following])) if collective else 0.0
            seconds = float(self.seconds[state, following])  # a move on a cheapest way is the cheapest way there
            routed = None
            if self.routing is not None and collective is not None:
                moves_experts = collective is Collective.ALL_TO_ALL and _EXPERTS in (old, new)
                routed = Routed(self.routing, int(_parts(codes[state], self.mesh, axis)) if moves_experts else 0)
            moves.append(Move(collective, axis, current[axis], placement, nbytes, seconds, routed))
            current[axis] = placement
            state = following
        return tuple(moves)

    @property
    def _codes(self) -> IntArray:
        """Codes of the axes, by place; the last one is that of no state."""
        codes = _space(len(self.shape), len(self.mesh.axes)).codes
        return np.asarray(codes[np.append(self._states, 0)])


def _parts(codes: IntArray, mesh: Mesh, axis: int) -> IntArray:
    """Return in how many parts the experts of rows are by other axes than one; codes are (..., axes)."""
    sizes = np.array([1 if other == axis else size for other, size in enumerate(mesh.shape)], np.int64)
    return np.asarray(np.where(codes == _EXPERTS, sizes, 1).prod(axis=-1))


def reshards(
    shape: tuple[int, ...],
    element_bytes: float,
    mesh: Mesh,
    cost: CostModel | Bucketed,
    chunks: tuple[int, ...] = (),
    routing: Routing | None = None,
    share: Share = ALONE,
    dealt: frozenset[int] = frozenset(),
) -> Reshards:
    """Return the cheapest ways between all placements of a tensor.

    Args:
        shape: Global shape.
        element_bytes: Bytes per element on the wire.
        mesh: The devices, numbered from the first device of a node.
        cost: What collectives cost.
        chunks: Per dim, in how many chunks it is cut before it is sharded; one each by default.
        routing: Of rows of experts, dim 0 of which are the experts, which of these the tokens chose.
        share: What the tensor pays of collectives in which it travels with others.
        dealt: Lengths of dims that may be dealt out in uneven blocks.
    """
    chunks = chunks or (1,) * len(shape)
    space = _space(len(shape), len(mesh.axes))
    sizes = np.array(mesh.shape, np.int64)
    split = np.where(space.codes >= _SHARD, sizes, 1)
    local = prod(shape) * element_bytes / split.prod(axis=1)
    fitting = np.ones(len(local), bool)
    for dim, size in enumerate(shape):
        own = space.codes == dim + _SHARD
        pieces = np.where(own, sizes, 1).prod(axis=1)
        fits = size % np.where(pieces > 1, pieces * chunks[dim], 1) == 0
        if size in dealt and chunks[dim] == 1:
            is_dealt = ~fits & (own.sum(axis=1) == 1)
            fits |= is_dealt
            local *= np.where(is_dealt, -(-size // pieces) * pieces / size, 1.0)
        fitting &= fits
    states = np.flatnonzero(fitting)
    if isinstance(cost, Bucketed):
        starts, sizes_of = np.unique(local[states], return_inverse=True)
        each = _between(shape, mesh, chunks, local, states, cost.carrying(starts[:, None]), len(starts), None, ALONE)
        number = np.append(sizes_of.astype(np.int64), 0)
        rows, first = np.arange(len(number)), each[0]
        seconds = np.stack([own.seconds for own in each])[number, rows]
        outside = np.stack([own.outside for own in each])[number, rows]
        hop = np.stack([own._hop for own in each])[number, rows]
        return Reshards(shape, mesh, chunks, first.places, seconds, outside, hop, states, first._local, each, number)
    return _between(shape, mesh, chunks, local, states, cost, 1, routing, share)[0]


def _between(
    shape: tuple[int, ...],
    mesh: Mesh,
    chunks: tuple[int, ...],
    local: FloatArray,
    states: IntArray,
    cost: CostModel | Carried,
    count: int,
    routing: Routing | None,
    share: Share,
) -> tuple[Reshards, ...]:
    """Return the cheapest ways between states that fit, whatever comes before a move.

    Args:
        shape: Global shape.
        mesh: The devices.
        chunks: As of `reshards`.
        local: (states,) bytes on a device.
        states: Those that fit.
        cost: What collectives cost, of one tensor or of a column of several that begin with different bytes.
        count: How many these are, each of which has ways of its own.
        routing: As of `reshards`.
        share: As of `reshards`.
    """
    space, other = _space(len(shape), len(mesh.axes)), len(states)
    leaves = [leaves_node(axis, cost.cluster.devices_per_node) for axis in mesh.axes]
    places = np.full(len(local), other)
    places[states] = np.arange(other)
    edges = np.full((count, other + 1, other + 1), np.inf)
    leaving = np.zeros(edges.shape)
    for axis, collective, sources, targets in space.moves:
        fits = (places[sources] < other) & (places[targets] < other)
        if collective is Collective.ALL_TO_ALL:
            for dim, size in enumerate(shape):
                if size % mesh.axes[axis].size:  # a dim that is dealt out, if it is split
                    fits &= (space.codes[sources, axis] != dim + _SHARD) & (space.codes[targets, axis] != dim + _SHARD)
        before, after = sources[fits], targets[fits]
        here, there = places[before], places[after]
        if collective is None:
            edges[:, here, there] = 0.0
        else:
            nbytes = np.maximum(local[before], local[after])
            edges[:, here, there] = share.seconds(cost, collective, nbytes, mesh.axes[axis])
            if routing is not None and collective is Collective.ALL_TO_ALL:
                codes, shares = space.codes, _parts(space.codes[before], mesh, axis)
                rows = (codes[before, axis] == _EXPERTS) | (codes[after, axis] == _EXPERTS)
                for number in np.unique(shares[rows]):
                    own = rows & (shares == number)
                    routed = Routed(routing, int(number))
                    edges[:, here[own], there[own]] = cost.collective_seconds(
                        collective, nbytes[own], mesh.axes[axis], routed
                    )
            if leaves[axis]:
                leaving[:, here, there] = edges[:, here, there]
    edges[:, np.arange(other), np.arange(other)] = 0.0
    # A direct move wins ties, so it is what comes first unless a way is shorter.
    first = np.broadcast_to(np.arange(other + 1, dtype=np.int16), edges.shape).copy()
    shortened(edges, leaving, first)
    outside = np.where(np.isfinite(edges), edges if all(leaves) else leaving, 0.0)
    known = np.append(local[states], 0.0)
    each = zip(edges, outside, first, strict=True)
    return tuple(Reshards(shape, mesh, chunks, places, *own, states, known, routing=routing) for own in each)


@dataclass(frozen=True, slots=True)
class Resharder:
    """Reshards by shape, each computed once.

    Attributes:
        mesh: The devices.
        cost: What collectives cost.
        dealt: Lengths of dims that may be dealt out in uneven blocks.
    """

    mesh: Mesh
    cost: CostModel | Bucketed
    dealt: frozenset[int] = frozenset()
    _known: dict[Hashable, Reshards] = field(default_factory=dict, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of memory of all that is known."""
        return sum(each.nbytes for each in self._known.values())

    def of(
        self,
        shape: tuple[int, ...],
        element_bytes: float,
        chunks: tuple[int, ...] = (),
        routing: Routing | None = None,
        share: Share = ALONE,
        dealt: frozenset[int] = frozenset(),
    ) -> Reshards:
        """Return the reshards of a tensor of this shape; the other arguments are as of `reshards`."""
        lengths = (self.dealt | dealt).intersection(shape)
        key = (shape, element_bytes, chunks or (1,) * len(shape), routing, share, lengths)
        found = self._known.get(key)
        if found is None:
            found = reshards(shape, element_bytes, self.mesh, self.cost, chunks, routing, share, lengths)
            self._known[key] = found
        return found


@lru_cache(maxsize=2)  # while tables are written and blocks lowered for one mesh
def bucketed(mesh: Mesh, costs: CostModel, dealt: frozenset[int] = frozenset()) -> Resharder:
    """Return the changes of placement on a mesh of what travels in buckets."""
    return Resharder(mesh, Bucketed(costs), dealt)

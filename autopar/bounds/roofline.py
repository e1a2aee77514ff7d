"""A floor under the step time and the bytes of a configuration, before anything is formulated.

On n devices an op takes at least its launch and one n-th of its FLOPs or bytes at the rate of its class, whatever its
sharding, more where an axis of the mesh divides none of its dims, and the slowest of p stages at least one p-th of a
microbatch. FLOPs, bytes and dims are affine in the number of samples, so two microbatch sizes give them for all.

Where a schedule has no closed form for its bubble, the longest path through its tasks has a floor of its own, that of
the blocks that are alike, which stages share (`bounds/critical_path.py`).

Parameters, sums of gradients and moments are sharded at most as far as the axes of the mesh divide their dims, and the
fullest of p stages holds at least one p-th of them.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from autopar.bounds.chain_cuts import least_of_cuts
from autopar.bounds.critical_path import PARTS, LeastPath, is_looked_at, least_path
from autopar.bounds.saved_values import most_shards
from autopar.bounds.task_graph import is_cut_short
from autopar.configuration import Configuration
from autopar.cost import ALONE, DEFAULT, CostModel, DtypePolicy, is_view, op_bytes
from autopar.folding.fold import Folded
from autopar.folding.graph_facts import element_bytes, fused_ops, global_shapes, host_seconds, moved_bytes
from autopar.folding.weight_gradients import weight_pass_ops
from autopar.formulate.scheduled_step import StageWork, scheduled_step
from autopar.formulate.step_time import Pipeline
from autopar.ir.graph import Phase, Role
from autopar.schedule import SCHEDULES, Pass
from autopar.sharding import Mesh

FloatArray = NDArray[np.float64]
Mask = NDArray[np.bool_]
IntArray = NDArray[np.int64]

_PASSES = list(Pass)

ROUNDING = 1e-9
"""Of sums of bytes, relative."""

WAITED = 0.05
"""Of the floor of a pass: about what it takes besides, for communication, in plans that are of interest."""


@dataclass(frozen=True, slots=True, eq=False)
class Floor:
    """What any plan takes at least.

    Attributes:
        names: Of each distinct op, in the representative of its kind.
        counts: Instances of each distinct op that runs once per microbatch.
        launches: Seconds of its launch.
        compute: Its seconds on one device if only FLOPs count: base and slope, base + slope * samples.
        memory: The same if only bytes count.
        dims: Lengths of the dims that it reads and writes, (ops, dims) padded with 1, as base and slope.
        states: Shapes of parameters and sums of gradients, and the bytes of an element of all that have it.
        moments: The same of moments, which can lie in host memory.
        beside: Bytes on a device of a parameter and the sum of its gradients, for each byte of its moments, at least.
        samples: The two microbatch sizes it is made from.
        alike: Which ops are of the most frequent kind of blocks.
        passes: Number of the pass of each op where the backward is split, (ops,).
        kinds: The kind of the block of each op, (ops,).
        host: Seconds in which the host launches a forward and a backward of a block of each kind, (kinds, 2).
        chain: The kind of every block; () if the two sizes do not agree in this.
    """

    names: tuple[str, ...]
    counts: FloatArray
    launches: FloatArray
    compute: tuple[FloatArray, FloatArray]
    memory: tuple[FloatArray, FloatArray]
    dims: tuple[FloatArray, FloatArray]
    states: tuple[tuple[tuple[int, ...], float], ...]
    moments: tuple[tuple[tuple[int, ...], float], ...]
    beside: float
    samples: tuple[int, int]
    alike: Mask
    passes: IntArray
    kinds: IntArray
    host: FloatArray
    chain: tuple[int, ...]

    def is_usual(self, samples: int) -> bool:
        """Whether microbatches of so many samples are imported as any others.

        One sample, or as many as another dim has, may be simplified.
        """
        base, slope = self.dims
        return samples > 1 and not bool((base[slope == 0] == samples).any())

    def seconds(self, configuration: Configuration, global_batch: int) -> float:
        """Return a lower bound on the step seconds of any plan of a configuration."""
        microbatch = self.microbatch(configuration.mesh, global_batch / configuration.num_microbatches)
        return microbatch * configuration.pipeline(DEFAULT).rounds / configuration.num_stages

    def microbatch(self, mesh: Mesh, samples: float) -> float:
        """Return the least seconds of a microbatch of so many samples through all stages, each on such a mesh."""
        return float(self.counts @ self.op_seconds(mesh, samples))

    def path(self, configuration: Configuration, global_batch: int) -> LeastPath | None:
        """Return what the longest path through a step takes at least, wherever the chain is cut.

        None if that says nothing: with one stage, or if there are too many tasks to look at.
        """
        schedule, pipeline = SCHEDULES[configuration.schedule], configuration.pipeline(DEFAULT)
        if pipeline.fills or not schedule.trains:
            return None
        alike, rest = self.passes_seconds(configuration.mesh, global_batch / configuration.num_microbatches)
        # what ops wait for comes on top: the bound is best for about as much
        besides = rest[0] + WAITED * alike[0], rest[1:].sum() + WAITED * alike[1:].sum()
        if not schedule.splits:
            alike = np.array([alike[0], alike[1:].sum()])
        count, chunks = configuration.num_microbatches, configuration.num_chunks
        return least_path(schedule, configuration.num_stages, count, chunks, alike.tolist(), besides)

    def even_seconds(self, configuration: Configuration, global_batch: int, pipeline: Pipeline, pace: float) -> float:
        """Return what a step takes if all stages are equal, more than `path_seconds` ever finds, at little cost.

        Arguments as of `path_seconds`; infinity where that finds nothing.
        """
        schedule, count = SCHEDULES[configuration.schedule], configuration.num_microbatches
        size = configuration.num_stages, count, configuration.num_chunks
        if pipeline.fills or not schedule.trains or not is_looked_at(schedule, *size):
            return math.inf
        passes = self.passes_seconds(configuration.mesh, global_batch / count).sum(axis=0)
        passes[1] += max(0.0, pace - passes.sum())
        total = float(passes.sum())
        if is_cut_short(schedule, *size):  # no schedule has more of a bubble than 1F1B
            return pipeline.with_turns * total * (count + size[0] - 1) / size[0] + pipeline.fixed
        parts = tuple(math.ceil(part / total * PARTS) for part in passes.tolist()) if total > 0 else (0,) * len(passes)
        if not schedule.splits:
            parts = (parts[0], sum(parts[1:]), 0)
        units = _even_units(configuration.schedule, *size, parts)
        return pipeline.with_turns * units * total / PARTS + pipeline.fixed

    def path_seconds(self, configuration: Configuration, global_batch: int, pipeline: Pipeline, pace: float) -> float:
        """Return the least seconds of a step that follow from its longest path; 0 if nothing does.

        Args:
            configuration: The configuration.
            global_batch: Samples per step.
            pipeline: How its step is cut in time.
            pace: What one microbatch takes at least, through all blocks.
        """
        path = self.path(configuration, global_batch)
        if path is None:
            return 0.0
        samples = global_batch / configuration.num_microbatches
        forward, *backward = self.passes_seconds(configuration.mesh, samples).sum(axis=0).tolist()
        besides = max(0.0, pace - forward - sum(backward))
        seconds = path.step(forward, sum(backward)) + min(path.forward, path.backward) * besides
        return float(pipeline.with_turns * seconds + pipeline.fixed)

    def cut_seconds(
        self, configuration: Configuration, global_batch: int, pipeline: Pipeline, blocks: tuple[float, ...]
    ) -> float:
        """Return the least seconds of a step wherever the chain is cut; 0 if there are too many cuts to look at.

        Schedules with a closed form need none.

        Args:
            configuration: The configuration.
            global_batch: Samples per step.
            pipeline: How its step is cut in time.
            blocks: What one microbatch takes at least in each block of the chain; () if unknown.
        """
        if pipeline.fills or not SCHEDULES[configuration.schedule].trains or not self.chain:
            return 0.0
        seconds = _cut_seconds(
            self,
            configuration.schedule,
            (configuration.num_stages, configuration.num_microbatches, configuration.num_chunks),
            configuration.mesh.shape,
            global_batch / configuration.num_microbatches,
            blocks,
        )
        return float(pipeline.with_turns * seconds + pipeline.fixed) if seconds else 0.0

    def passes_seconds(self, mesh: Mesh, samples: float) -> FloatArray:
        """Return the least that each pass of a microbatch takes in all blocks that are alike, and in all others.

        They are (2, 3): forward, backward and weight pass, as if the backward was split.
        """
        seconds = self.counts * self.op_seconds(mesh, samples)
        own = [np.bincount(self.passes, seconds * here, len(_PASSES)) for here in (self.alike, ~self.alike)]
        return np.array(own)

    def chained_launches(self) -> float:
        """Return the seconds to launch the ops of a microbatch that follow each other in any pipeline.

        Weight passes are left out: those of different stages may run side by side.
        """
        chained = self.passes != _PASSES.index(Pass.WEIGHT)
        return float(self.counts[chained] @ self.launches[chained])

    def passes_of(self, names: Collection[str], mesh: Mesh, samples: float) -> FloatArray:
        """Return the least that each pass of all instances of some ops takes, (3,), as of `passes_seconds`."""
        chosen = np.array([name in names for name in self.names], dtype=bool)
        seconds = self.counts * self.op_seconds(mesh, samples) * chosen
        return np.bincount(self.passes, seconds, len(_PASSES)).astype(np.float64)

    def op_seconds(self, mesh: Mesh, samples: float) -> FloatArray:
        """Return the least that each distinct op takes on a mesh for a microbatch of so many samples, (ops,)."""
        return _op_seconds(self, mesh.shape, samples)

    def seconds_of(self, names: Collection[str], mesh: Mesh, samples: float) -> float:
        """Return the least that all instances of some ops take on a mesh for a microbatch of so many samples."""
        chosen = np.array([name in names for name in self.names], dtype=bool)
        return float(self.counts[chosen] @ self.op_seconds(mesh, samples)[chosen])

    def bytes(self, configuration: Configuration, *, offload: bool = False) -> float:
        """Return a lower bound on what the fullest device of any plan holds of parameters, gradients and optimizer.

        Args:
            configuration: The configuration.
            offload: Whether the optimizer's state may lie in host memory.
        """
        states = self.states if offload else (*self.states, *self.moments)
        return _held(states, configuration)

    def finds_room(self, configuration: Configuration, limit: float, host_room: float) -> bool:
        """Whether the optimizer's state may lie in host memory where devices have no room for it.

        It does for whole stages. So a group of devices with one of them holds no more of it than it can have there, or
        beside the parameters; one with several may divide it.

        Args:
            configuration: The configuration.
            limit: Bytes per device.
            host_room: Bytes of host memory per device.
        """
        if not self.beside:
            return True
        hosted = min(host_room, limit / self.beside)
        rest = (limit - self.beside * hosted) / (1 + self.beside)
        most = hosted + rest if configuration.num_chunks > 1 else max(hosted, limit / (1 + self.beside))
        return _held(self.moments, configuration) <= most * (1 + ROUNDING)


def _held(states: Sequence[tuple[tuple[int, ...], float]], configuration: Configuration) -> float:
    """Return the least bytes of states, by shape and bytes per element, on the fullest device of a configuration."""
    axes = tuple(axis.size for axis in configuration.mesh.axes)
    return sum(size * prod(shape) / most_shards(shape, axes) for shape, size in states) / configuration.num_stages


@lru_cache(maxsize=4096)  # schedules and cuts into stages do not matter
def _op_seconds(floor: Floor, mesh: tuple[int, ...], samples: float) -> FloatArray:
    """Return `Floor.op_seconds` on a mesh of this shape; not to be written to."""
    compute, memory, dims = (base + slope * samples for base, slope in (floor.compute, floor.memory, floor.dims))
    lengths, devices = np.rint(dims).astype(np.int64), np.ones(len(floor.counts))
    for size in mesh:
        # An axis that divides no dim of an op leaves all of it to each of its devices.
        devices *= np.where((lengths % size == 0).any(axis=1), size, 1)
    seconds = np.asarray(floor.launches + np.maximum(compute, memory) / devices)
    seconds.flags.writeable = False
    return seconds


@lru_cache(maxsize=4096)
def _cut_seconds(
    floor: Floor,
    schedule: str,
    size: tuple[int, int, int],
    mesh: tuple[int, ...],
    samples: float,
    blocks: tuple[float, ...],
) -> float:
    """Return what `least_of_cuts` makes of the floor of every block."""
    count, chain = len(floor.host), np.asarray(floor.chain)
    places = floor.kinds * len(_PASSES) + floor.passes
    each = np.bincount(places, _op_seconds(floor, mesh, samples), count * len(_PASSES)).reshape(count, -1)
    each[:, 0] = np.maximum(each[:, 0], floor.host[:, 0])
    whole = (each[:, 0] + np.maximum(each[:, 1:].sum(axis=1), floor.host[:, 1]))[chain]
    if blocks:
        whole = np.maximum(whole, blocks)
    return least_of_cuts(SCHEDULES[schedule], *size, each[chain], whole)


@lru_cache(maxsize=4096)
def _even_units(
    schedule: str, num_groups: int, num_microbatches: int, num_chunks: int, passes: tuple[int, ...]
) -> float:
    """Return what a step takes if all stages are equal, given the passes of one microbatch through all of them."""
    count = num_groups * num_chunks
    forward, backward, weight = (own / count for own in passes)
    stage = StageWork(forward, backward, weight)
    return scheduled_step(schedule, num_groups, num_microbatches, [stage] * count)


def floor(small: Folded, large: Folded, samples: tuple[int, int], costs: CostModel) -> Floor:
    """Return the floor of a model from its graphs at two microbatch sizes; equal graphs if it has only one."""
    work, work_large = _work(small, costs), _work(large, costs)
    # An op that only one size has (an Expand that is none for one sample) adds nothing to a floor.
    common = [name for name, (count, *_) in work.items() if name in work_large and work_large[name][0] == count]
    counts, launches, *times = np.array([work[name] for name in common], dtype=np.float64).reshape(-1, 4).T
    alike, passes, kinds = _places(small, common)
    _, _, *times_large = np.array([work_large[name] for name in common], dtype=np.float64).reshape(-1, 4).T
    step = max(1, samples[1] - samples[0])
    slopes = [(many - few) / step for few, many in zip(times, times_large, strict=True)]
    compute, memory = ((few - slope * samples[0], slope) for few, slope in zip(times, slopes, strict=True))
    lengths = _lengths(small, large, common)
    slope = (lengths[1] - lengths[0]) / step
    dims = lengths[0] - slope * samples[0], slope
    states, moments = _states(small.pattern, costs.policy)
    beside = _beside(small.pattern, costs.policy)
    return Floor(
        tuple(common),
        counts,
        launches,
        compute,
        memory,
        dims,
        states,
        moments,
        beside,
        samples,
        alike,
        passes,
        kinds,
        host_seconds(small, costs),
        small.chain if small.chain == large.chain else (),
    )


def _places(folded: Folded, names: Sequence[str]) -> tuple[Mask, IntArray, IntArray]:
    """Return which ops are of the most frequent kind, and the numbers of the pass and of the kind of each."""
    most = max((kind.count for kind in folded.kinds), default=0)
    main = next((kind.id for kind in folded.kinds if kind.count == most), None)
    kinds = {op.name: kind.id for kind in folded.kinds for op in kind.ops}
    late = {name for kind in folded.kinds for name in weight_pass_ops(folded, kind)}
    backward = {op.name for kind in folded.kinds for op in kind.ops if op.phase is Phase.BACKWARD}
    passes = [
        _PASSES.index(Pass.WEIGHT if name in late else Pass.BACKWARD if name in backward else Pass.FORWARD)
        for name in names
    ]
    places = np.array([kinds[name] for name in names], dtype=np.int64)
    return np.array([kinds[name] == main for name in names], dtype=bool), np.array(passes, dtype=np.int64), places


def scales(small: Folded, large: Folded, samples: tuple[int, int]) -> bool:
    """Whether two microbatch sizes have the same ops, on dims that do not see the samples or are multiples of them."""
    few, many = ({op.name: op.kind for kind in folded.kinds for op in kind.ops} for folded in (small, large))
    return few == many and bool(_in_proportion(_lengths(small, large, [*few]), samples).all())


def _in_proportion(lengths: FloatArray, samples: tuple[int, int]) -> Mask:
    """Return which dims do not see the samples, or are whole multiples of them; `lengths` as of `_lengths`."""
    few, many = lengths
    multiples = (few * samples[1] == many * samples[0]) & (few % samples[0] == 0)
    return np.asarray((few > 0) & ((few == many) | multiples))


def _lengths(small: Folded, large: Folded, names: Sequence[str]) -> FloatArray:
    """Return the lengths of all dims that ops read and write in two graphs, (2, ops, dims).

    They are padded with 1, which nothing divides. Ops that have other dims in one than in the other have 0, which
    everything does.
    """
    both = []
    for folded in (small, large):
        ops = {op.name: op for kind in folded.kinds for op in kind.ops}
        rows = []
        for name in names:
            inputs, outputs = global_shapes(folded.graph, ops[name])
            rows.append([int(length) for shape in (*inputs, *outputs) if shape is not None for length in shape[0]])
        both.append(rows)
    found = np.ones((2, len(names), max((len(row) for row in both[0]), default=1)))
    for number, (few, many) in enumerate(zip(*both, strict=True)):
        if len(few) == len(many):
            found[:, number, : len(few)] = few, many
        else:
            found[:, number] = 0.0
    return found


@lru_cache(maxsize=8)
def _states(folded: Folded, policy: DtypePolicy) -> tuple[tuple[tuple[tuple[int, ...], float], ...], ...]:
    """Return the shapes of what stays through the step, and the bytes of an element of all with it; moments last."""
    resident, _ = element_bytes(folded, policy)
    return tuple(tuple(_sizes(folded, resident, moments=moments).items()) for moments in (False, True))


@lru_cache(maxsize=8)
def _beside(folded: Folded, policy: DtypePolicy) -> float:
    """Return `Floor.beside`: 0 where moments do not have the shape of their parameter, which says nothing of shards."""
    graph = folded.graph
    resident, _ = element_bytes(folded, policy)
    here, away = dict[str, float](), dict[str, float]()
    for role, name, owner in _resident(folded):
        if role is Role.MOMENT and graph.values[name].shape != graph.values[owner].shape:
            return 0.0
        held = away if role is Role.MOMENT else here
        held[owner] = held.get(owner, 0.0) + resident[name]
    return min((here.get(owner, 0.0) / size for owner, size in away.items()), default=0.0)


def _sizes(folded: Folded, resident: Mapping[str, float], *, moments: bool) -> dict[tuple[int, ...], float]:
    sizes: dict[tuple[int, ...], float] = {}
    for role, name, _ in _resident(folded):
        if (role is Role.MOMENT) == moments:
            shape = folded.graph.values[name].shape
            sizes[shape] = sizes.get(shape, 0.0) + resident[name]
    return sizes


def _resident(folded: Folded) -> Iterator[tuple[Role, str, str]]:
    """Yield parameters, sums of gradients and moments: role, name and the parameter they belong to."""
    for state in folded.graph.states:
        if state.role is Role.PARAMETER:
            yield state.role, state.input, state.owner
        elif state.role in (Role.GRADIENT, Role.MOMENT) and state.output != state.input:
            yield state.role, state.output, state.owner


def _work(folded: Folded, costs: CostModel) -> dict[str, tuple[float, float, float, float]]:
    """Return count and seconds of launch, compute and memory of every distinct op but views and updates, by name."""
    element_bytes = moved_bytes(folded, costs.policy)
    work = {}
    fused = fused_ops(folded, costs)
    for kind in folded.kinds:
        for op in kind.ops:
            part = fused.get(op.name, ALONE)
            if op.phase is Phase.UPDATE or not part.launches:
                continue
            inputs, outputs = global_shapes(folded.graph, op)
            first = next((shape for shape in inputs if shape is not None), None)
            if is_view(op, 0 if first is None else first.shape[1]):
                continue
            compute = float(costs.least_compute_seconds(op, inputs, outputs)[0])
            moved = float(op_bytes(op, inputs, outputs, element_bytes, part.unread, part.unwritten)[0])
            work[op.name] = (
                float(kind.count),
                costs.launch_seconds(op, part),
                compute,
                moved / costs.bytes_per_second(op),
            )
    return work

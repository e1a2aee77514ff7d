"""Roofline bound: step seconds and resident bytes of a configuration from sizes alone.

```text
t_op    >= launch_op + max(FLOPs_op / peak, bytes_op / bandwidth) / N_op
step    >= rounds W / p,   W = sum over ops of t_op         rounds = m + p - 1  (1F1B, GPipe, inference),  m  (others)
peak    >= (1 / p) sum over parameters, gradient sums, moments v of bytes(v) / shards(v)
```

Look here for the cheapest bounds of a node. N_op is the product of the mesh axes whose size divides some dim of the
op, shards(v) the largest number of shards of a tensor. FLOPs, bytes and dims are affine in the number of samples, so
that the graphs at two microbatch sizes give them for all.

- *Relaxes*: placements, communication and cuts into stages; the time bounds relax memory, too.
- *Valid when*: all stages have equal meshes.
- *Cost*: one vector expression per mesh and microbatch size, cached.
- *Source*: roofline model, Williams, Waterman and Patterson, 2009, CACM 52(4).
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.bounds.chain_cuts import least_step_over_cuts
from autopar.bounds.critical_path import PARTS, CriticalPath, has_path_bound, least_path
from autopar.bounds.saved_values import freed, most_shards
from autopar.bounds.task_graph import is_truncated
from autopar.configuration import Configuration
from autopar.cost import ALONE, IDEAL, CostModel, DtypePolicy, is_view, op_bytes
from autopar.folding.fold import Folded
from autopar.folding.graph_facts import (
    dealt_lengths,
    element_bytes,
    fused_ops,
    global_shapes,
    host_seconds,
    moved_bytes,
)
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
"""Relative rounding error of sums of bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Roofline:
    """Roofline bounds of a model.

    Attributes:
        names: Name of each distinct op, in the representative of its kind.
        counts: Instances of each distinct op that runs once per microbatch.
        launches: Launch seconds of each op.
        compute: Seconds of each op on one device by FLOPs alone, as base and slope: base + slope * samples.
        memory: Seconds of each op on one device by bytes alone, as base and slope.
        dims: Lengths of the dims that an op reads and writes, (ops, dims) padded with 1, as base and slope.
        dealt: Whether a dim may be dealt out in uneven blocks, so that every axis may split it, (ops, dims).
        states: Shapes of parameters and gradient sums, as of `freed`, each with the bytes of all tensors of this shape.
        moments: Shapes of moments, which can lie in host memory; as `states`.
        per_moment_byte: Least device bytes of a parameter and its gradient sum per byte of its moments.
        samples: The two microbatch sizes it is made from.
        is_repeated: Whether each op belongs to the most frequent kind of blocks.
        passes: Number of the pass of each op if the backward is split, (ops,).
        kinds: Kind of the block of each op, (ops,).
        host: Seconds in which the host launches a forward and a backward of each kind of block, (kinds, 2).
        chain: Kind of every block; () if the two sizes do not agree in this.
    """

    names: tuple[str, ...]
    counts: FloatArray
    launches: FloatArray
    compute: tuple[FloatArray, FloatArray]
    memory: tuple[FloatArray, FloatArray]
    dims: tuple[FloatArray, FloatArray]
    dealt: Mask
    states: tuple[tuple[tuple[int, ...], float], ...]
    moments: tuple[tuple[tuple[int, ...], float], ...]
    per_moment_byte: float
    samples: tuple[int, int]
    is_repeated: Mask
    passes: IntArray
    kinds: IntArray
    host: FloatArray
    chain: tuple[int, ...]

    def is_generic(self, samples: int) -> bool:
        """Whether a microbatch size is imported without special cases.

        One sample, or as many samples as another dim has elements, may be simplified.
        """
        base, slope = self.dims
        return samples > 1 and not bool((base[slope == 0] == samples).any())

    def seconds(self, configuration: Configuration, global_batch: int) -> float:
        """Lower bound on the step seconds of any plan of a configuration."""
        of_microbatch = self.microbatch_seconds(configuration.mesh, global_batch / configuration.num_microbatches)
        return of_microbatch * configuration.pipeline(IDEAL).rounds / configuration.num_stages

    def microbatch_seconds(self, mesh: Mesh, samples: float) -> float:
        """Least seconds of a microbatch through all stages, each on such a mesh."""
        return float(self.counts @ self.op_seconds(mesh, samples))

    def path(self, configuration: Configuration, global_batch: int) -> CriticalPath | None:
        """Critical path bound of a configuration; None with one stage, a closed form, or too many stages.

        Communication counts as free; with a typical share of it the bounds of the yardstick's jobs are the same.
        """
        schedule, pipeline = SCHEDULES[configuration.schedule], configuration.pipeline(IDEAL)
        if pipeline.fills or not schedule.trains:
            return None
        repeated, rest = self.passes_seconds(configuration.mesh, global_batch / configuration.num_microbatches)
        others = rest[0], rest[1:].sum()
        if not schedule.splits:
            repeated = np.array([repeated[0], repeated[1:].sum()])
        count, chunks = configuration.num_microbatches, configuration.num_chunks
        return least_path(schedule, configuration.num_stages, count, chunks, repeated.tolist(), others)

    def even_seconds(
        self, configuration: Configuration, global_batch: int, pipeline: Pipeline, microbatch_seconds: float
    ) -> float:
        """Step seconds with equal stages, never below `path_seconds`, at little cost.

        Arguments as of `path_seconds`; infinity where that has no bound.
        """
        schedule, count = SCHEDULES[configuration.schedule], configuration.num_microbatches
        size = configuration.num_stages, count, configuration.num_chunks
        if pipeline.fills or not schedule.trains or not has_path_bound(schedule, *size):
            return math.inf
        passes = self.passes_seconds(configuration.mesh, global_batch / count).sum(axis=0)
        passes[1] += max(0.0, microbatch_seconds - passes.sum())
        total = float(passes.sum())
        if is_truncated(schedule, *size):  # no schedule has a larger bubble than 1F1B
            return pipeline.with_turns * total * (count + size[0] - 1) / size[0] + pipeline.fixed
        units_of_pass = (
            tuple(math.ceil(part / total * PARTS) for part in passes.tolist()) if total > 0 else (0,) * len(passes)
        )
        if not schedule.splits:
            units_of_pass = (units_of_pass[0], sum(units_of_pass[1:]), 0)
        units = _equal_stages_units(configuration.schedule, *size, units_of_pass)
        return pipeline.with_turns * units * total / PARTS + pipeline.fixed

    def path_seconds(
        self, configuration: Configuration, global_batch: int, pipeline: Pipeline, microbatch_seconds: float
    ) -> float:
        """Critical path bound on the step seconds; 0 if there is none.

        Args:
            configuration: The configuration.
            global_batch: Samples per step.
            pipeline: The pipeline of the configuration.
            microbatch_seconds: Least seconds of one microbatch through all blocks.
        """
        path = self.path(configuration, global_batch)
        if path is None:
            return 0.0
        samples = global_batch / configuration.num_microbatches
        forward, *backward = self.passes_seconds(configuration.mesh, samples).sum(axis=0).tolist()
        excess = max(0.0, microbatch_seconds - forward - sum(backward))
        seconds = path.step(forward, sum(backward)) + min(path.forward, path.backward) * excess
        return float(pipeline.with_turns * seconds + pipeline.fixed)

    def cut_seconds(
        self, configuration: Configuration, global_batch: int, pipeline: Pipeline, blocks: tuple[float, ...]
    ) -> float:
        """Lower bound on the step seconds over all cuts of the chain; 0 with too many cuts or a closed form.

        Args:
            configuration: The configuration.
            global_batch: Samples per step.
            pipeline: The pipeline of the configuration.
            blocks: Least seconds of one microbatch in each block of the chain; () if unknown.
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
        """Least seconds of each pass of a microbatch, (2, 3): in repeated blocks, and in all others.

        The passes are forward, backward and weight pass, as if the backward was split.
        """
        seconds = self.counts * self.op_seconds(mesh, samples)
        by_kind = [
            np.bincount(self.passes, seconds * mask, len(_PASSES)) for mask in (self.is_repeated, ~self.is_repeated)
        ]
        return np.array(by_kind)

    def chained_launches(self) -> float:
        """Launch seconds of the ops of a microbatch that run one after another in any pipeline.

        Weight passes are left out: those of different stages may run in parallel.
        """
        chained = self.passes != _PASSES.index(Pass.WEIGHT)
        return float(self.counts[chained] @ self.launches[chained])

    def passes_of(self, names: Collection[str], mesh: Mesh, samples: float) -> FloatArray:
        """Least seconds of each pass of all instances of some ops, (3,), as of `passes_seconds`."""
        chosen = np.array([name in names for name in self.names], dtype=bool)
        seconds = self.counts * self.op_seconds(mesh, samples) * chosen
        return np.bincount(self.passes, seconds, len(_PASSES)).astype(np.float64)

    def op_seconds(self, mesh: Mesh, samples: float) -> FloatArray:
        """Least seconds of each distinct op on a mesh for a microbatch, (ops,)."""
        return _op_seconds(self, mesh.shape, samples)

    def seconds_of(self, names: Collection[str], mesh: Mesh, samples: float) -> float:
        """Least seconds of all instances of some ops on a mesh for a microbatch."""
        chosen = np.array([name in names for name in self.names], dtype=bool)
        return float(self.counts[chosen] @ self.op_seconds(mesh, samples)[chosen])

    def bytes(self, configuration: Configuration, *, offload: bool = False) -> float:
        """Lower bound on the resident bytes of the fullest device of any plan: parameters, gradients, optimizer.

        Args:
            configuration: The configuration.
            offload: Whether the optimizer's state may lie in host memory.
        """
        states = self.states if offload else (*self.states, *self.moments)
        return _state_bytes(states, configuration)

    def finds_room(self, configuration: Configuration, limit: float, host_room: float) -> bool:
        """Whether optimizer state that does not fit into devices may lie in host memory.

        A group holds at most as much of it as fits into host memory, beside parameters and gradients of all of it.

        Args:
            configuration: The configuration.
            limit: Bytes per device.
            host_room: Bytes of host memory per device.
        """
        if not self.per_moment_byte:
            return True
        hosted = min(host_room, limit / self.per_moment_byte)
        rest = (limit - self.per_moment_byte * hosted) / (1 + self.per_moment_byte)
        return _state_bytes(self.moments, configuration) <= (hosted + rest) * (1 + ROUNDING)


def _state_bytes(states: Sequence[tuple[tuple[int, ...], float]], configuration: Configuration) -> float:
    """Least bytes of states, by shape and bytes of all tensors of it, on the fullest device of a configuration."""
    axes = tuple(axis.size for axis in configuration.mesh.axes)
    return sum(nbytes / most_shards(shape, axes) for shape, nbytes in states) / configuration.num_stages


@lru_cache(maxsize=4096)  # independent of schedules and cuts
def _op_seconds(roofline: Roofline, mesh: tuple[int, ...], samples: float) -> FloatArray:
    """Compute `Roofline.op_seconds` on a mesh of this shape; the result is read-only."""
    compute, memory, dims = (
        base + slope * samples for base, slope in (roofline.compute, roofline.memory, roofline.dims)
    )
    lengths, devices = np.rint(dims).astype(np.int64), np.ones(len(roofline.counts))
    for size in mesh:
        # An op of which an axis divides no dim runs whole on every device of the axis.
        devices *= np.where(((lengths % size == 0) | roofline.dealt).any(axis=1), size, 1)
    seconds = np.asarray(roofline.launches + np.maximum(compute, memory) / devices)
    seconds.flags.writeable = False
    return seconds


@lru_cache(maxsize=4096)
def _cut_seconds(
    roofline: Roofline,
    schedule: str,
    size: tuple[int, int, int],
    mesh: tuple[int, ...],
    samples: float,
    blocks: tuple[float, ...],
) -> float:
    """Evaluate `least_step_over_cuts` with the roofline seconds of every block."""
    num_kinds, chain = len(roofline.host), np.asarray(roofline.chain)
    bins = roofline.kinds * len(_PASSES) + roofline.passes
    passes = np.bincount(bins, _op_seconds(roofline, mesh, samples), num_kinds * len(_PASSES)).reshape(num_kinds, -1)
    passes[:, 0] = np.maximum(passes[:, 0], roofline.host[:, 0])
    whole = (passes[:, 0] + np.maximum(passes[:, 1:].sum(axis=1), roofline.host[:, 1]))[chain]
    if blocks:
        whole = np.maximum(whole, blocks)
    return least_step_over_cuts(SCHEDULES[schedule], *size, passes[chain], whole)


@lru_cache(maxsize=4096)
def _equal_stages_units(
    schedule: str, num_groups: int, num_microbatches: int, num_chunks: int, passes: tuple[int, ...]
) -> float:
    """Step time if all stages are equal, given the passes of one microbatch through all of them."""
    count = num_groups * num_chunks
    forward, backward, weight = (seconds / count for seconds in passes)
    stage = StageWork(forward, backward, weight)
    return scheduled_step(schedule, num_groups, num_microbatches, [stage] * count)


@lru_cache(maxsize=8)  # a job asks for those of its spaces several times
def roofline(small: Folded, large: Folded, samples: tuple[int, int], costs: CostModel) -> Roofline:
    """Build the roofline bounds of a model from its graphs at two microbatch sizes; equal graphs if it has one size."""
    work, work_large = _op_work(small, costs), _op_work(large, costs)
    # Ops that only one size has (an Expand that vanishes for one sample) are left out, which keeps the bound valid.
    common = [name for name, (count, *_) in work.items() if name in work_large and work_large[name][0] == count]
    counts, launches, *times = np.array([work[name] for name in common], dtype=np.float64).reshape(-1, 4).T
    is_repeated, passes, kinds = _op_positions(small, common)
    _, _, *times_large = np.array([work_large[name] for name in common], dtype=np.float64).reshape(-1, 4).T
    step = max(1, samples[1] - samples[0])
    slopes = [(many - few) / step for few, many in zip(times, times_large, strict=True)]
    compute, memory = ((few - slope * samples[0], slope) for few, slope in zip(times, slopes, strict=True))
    lengths = _dim_lengths(small, large, common)
    slope = (lengths[1] - lengths[0]) / step
    dims = lengths[0] - slope * samples[0], slope
    dealt = np.isin(lengths[0], [*dealt_lengths(small)]) & (slope == 0)
    states, moments = _state_shapes(small.pattern, costs.policy)
    per_moment_byte = _bytes_per_moment_byte(small.pattern, costs.policy)
    return Roofline(
        tuple(common),
        counts,
        launches,
        compute,
        memory,
        dims,
        dealt,
        states,
        moments,
        per_moment_byte,
        samples,
        is_repeated,
        passes,
        kinds,
        host_seconds(small, costs),
        small.chain if small.chain == large.chain else (),
    )


def _op_positions(folded: Folded, names: Sequence[str]) -> tuple[Mask, IntArray, IntArray]:
    """Whether each op is of the most frequent kind, and the numbers of its pass and of its kind."""
    most = max((kind.count for kind in folded.kinds), default=0)
    main = next((kind.id for kind in folded.kinds if kind.count == most), None)
    kinds = {op.name: kind.id for kind in folded.kinds for op in kind.ops}
    weight_ops = {name for kind in folded.kinds for name in weight_pass_ops(folded, kind)}
    backward = {op.name for kind in folded.kinds for op in kind.ops if op.phase is Phase.BACKWARD}
    passes = [
        _PASSES.index(Pass.WEIGHT if name in weight_ops else Pass.BACKWARD if name in backward else Pass.FORWARD)
        for name in names
    ]
    kind_of_op = np.array([kinds[name] for name in names], dtype=np.int64)
    return np.array([kinds[name] == main for name in names], dtype=bool), np.array(passes, dtype=np.int64), kind_of_op


def scales(small: Folded, large: Folded, samples: tuple[int, int]) -> bool:
    """Whether two microbatch sizes have the same ops, on dims that are equal or proportional to the samples."""
    few, many = ({op.name: op.kind for kind in folded.kinds for op in kind.ops} for folded in (small, large))
    return few == many and bool(_is_proportional(_dim_lengths(small, large, [*few]), samples).all())


def _is_proportional(lengths: FloatArray, samples: tuple[int, int]) -> Mask:
    """Mask of dims that are equal, or whole multiples of the samples; `lengths` as of `_dim_lengths`."""
    few, many = lengths
    multiples = (few * samples[1] == many * samples[0]) & (few % samples[0] == 0)
    return np.asarray((few > 0) & ((few == many) | multiples))


def _dim_lengths(small: Folded, large: Folded, names: Sequence[str]) -> FloatArray:
    """Lengths of all dims that ops read and write in two graphs, (2, ops, dims).

    Rows are padded with 1, which no axis divides. An op with other dims in one graph than in the other has 0, which
    every axis divides.
    """
    rows_of_graph = []
    for folded in (small, large):
        ops = {op.name: op for kind in folded.kinds for op in kind.ops}
        rows = []
        for name in names:
            inputs, outputs = global_shapes(folded.graph, ops[name])
            rows.append([int(length) for shape in (*inputs, *outputs) if shape is not None for length in shape[0]])
        rows_of_graph.append(rows)
    lengths = np.ones((2, len(names), max((len(row) for row in rows_of_graph[0]), default=1)))
    for number, (few, many) in enumerate(zip(*rows_of_graph, strict=True)):
        if len(few) == len(many):
            lengths[:, number, : len(few)] = few, many
        else:
            lengths[:, number] = 0.0
    return lengths


@lru_cache(maxsize=8)
def _state_shapes(folded: Folded, policy: DtypePolicy) -> tuple[tuple[tuple[tuple[int, ...], float], ...], ...]:
    """Shapes of resident tensors with the bytes of all tensors of each shape; moments last."""
    resident, _ = element_bytes(folded, policy)
    return tuple(tuple(_bytes_by_shape(folded, resident, moments=moments).items()) for moments in (False, True))


@lru_cache(maxsize=8)
def _bytes_per_moment_byte(folded: Folded, policy: DtypePolicy) -> float:
    """Compute `Roofline.per_moment_byte`: 0 if moments have other shapes than parameters, and shard otherwise."""
    graph = folded.graph
    resident, _ = element_bytes(folded, policy)
    device_bytes, moment_bytes = dict[str, float](), dict[str, float]()
    for role, name, owner in _resident_states(folded):
        if role is Role.MOMENT and graph.values[name].shape != graph.values[owner].shape:
            return 0.0
        bytes_of_owner = moment_bytes if role is Role.MOMENT else device_bytes
        bytes_of_owner[owner] = bytes_of_owner.get(owner, 0.0) + resident[name]
    return min((device_bytes.get(owner, 0.0) / size for owner, size in moment_bytes.items()), default=0.0)


def _bytes_by_shape(folded: Folded, resident: Mapping[str, float], *, moments: bool) -> dict[tuple[int, ...], float]:
    """Bytes of all moments, or of all other states, by shape."""
    sizes: dict[tuple[int, ...], float] = {}
    for role, name, _ in _resident_states(folded):
        if (role is Role.MOMENT) == moments:
            value = folded.graph.values[name]
            shape = freed(value.shape, folded)
            sizes[shape] = sizes.get(shape, 0.0) + value.size * resident[name]
    return sizes


def _resident_states(folded: Folded) -> Iterator[tuple[Role, str, str]]:
    """Yield role, name and owning parameter of parameters, gradient sums and moments."""
    for state in folded.graph.states:
        if state.role is Role.PARAMETER:
            yield state.role, state.input, state.owner
        elif state.role in (Role.GRADIENT, Role.MOMENT) and state.output != state.input:
            yield state.role, state.output, state.owner


def _op_work(folded: Folded, costs: CostModel) -> dict[str, tuple[float, float, float, float]]:
    """Count and seconds of launch, compute and memory of every distinct op but views and updates, by name."""
    element_bytes = moved_bytes(folded, costs.policy)
    work = {}
    fused = fused_ops(folded, costs)
    for kind in folded.kinds:
        for op in kind.ops:
            fusion = fused.get(op.name, ALONE)
            if op.phase is Phase.UPDATE or not fusion.launches:
                continue
            inputs, outputs = global_shapes(folded.graph, op)
            first = next((shape for shape in inputs if shape is not None), None)
            if is_view(op, 0 if first is None else first.shape[1]):
                continue
            compute = float(costs.least_compute_seconds(op, inputs, outputs)[0])
            nbytes = float(op_bytes(op, inputs, outputs, element_bytes, fusion.unread, fusion.unwritten)[0])
            work[op.name] = (
                float(kind.count),
                costs.launch_seconds(op, fusion),
                compute,
                nbytes / costs.bytes_per_second(op),
            )
    return work

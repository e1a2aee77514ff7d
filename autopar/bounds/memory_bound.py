"""Memory bound: the recompute and the uneven stages that a memory limit enforces, before any table is written.

```text
min sum_r z_r a_r    such that    R h + c sum_r z_r k_r <= limit,   sum_r z_r = 1              fractional knapsack
```

Look here for lower bounds that depend on memory and need no placements. On a mesh, every value takes at least its bytes
over the largest number of shards of its dims. k_r are the kept bytes of all repeated blocks under recompute flavour r,
a_r their recompute seconds, R the resident bytes; h and c weigh them in a mean stage (`mean_bytes`). The optimum is
added to the least seconds of a microbatch without recompute. `memory_lp.py` distributes blocks over groups where the
schedule holds more on some groups than on others.

- *Relaxes*: placements and cuts: every value has its most shards, and blocks recompute in fractional shares; other
  kinds of blocks keep nothing.
- *Valid when*: memory is limited and activations may not be offloaded to the host.
- *Cost*: a closed form per configuration; one linear program where stages are uneven.
- *Source*: continuous knapsack, Dantzig, 1957, Oper. Res. 5.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np

from autopar.bounds.cut_lp import MOST_CUT_STAGES, RemainingCosts, TaskOrder
from autopar.bounds.memory_lp import MOST_STAGES, PipelineLoad, fits_evenly, least_scheduled_step, least_step
from autopar.bounds.microbatch import MicrobatchBound
from autopar.bounds.roofline import FloatArray, Roofline
from autopar.bounds.saved_values import (
    deferred_values,
    main_kind,
    most_shards,
    received_values,
    resident_states,
    saved_by,
    saved_by_main,
    sharded_states,
)
from autopar.configuration import Configuration
from autopar.cost import CostModel
from autopar.cost.collectives import leaves_node
from autopar.folding.fold import Folded
from autopar.folding.selective_recompute import is_forward, selective_ops
from autopar.formulate.block_memory import KEPT
from autopar.formulate.constraints import Constraints
from autopar.formulate.data_major import is_data_major
from autopar.formulate.mean_memory import stage_weights
from autopar.formulate.step_time import Pipeline
from autopar.formulate.tables import Memory
from autopar.recompute import Hosted, Recompute
from autopar.schedule import SCHEDULES
from autopar.schedule.base import Schedule
from autopar.sharding import Mesh

LARGE_MESSAGE = 1e15
"""Bytes of a collective so large that its seconds per byte are the least."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Bytes of a block of the most frequent kind on a mesh under any schedule; shares of a device unless stated.

    Attributes:
        count: Number of these blocks.
        device_bytes: Bytes of a device.
        least_resident: Resident bytes with the most shards of everything.
        resident: Resident bytes if nothing is communicated in microbatches.
        late: Bytes that it retains of a microbatch until its weight pass.
        received: Bytes that a stage receives from the previous and from the next stage.
        outer: Number of first and of last stages that may have none of these blocks.
        alternatives: Other layouts: resident bytes, and link seconds per microbatch.
    """

    count: int
    device_bytes: float
    least_resident: float
    resident: float
    late: float
    received: tuple[float, float]
    outer: tuple[int, int]
    alternatives: tuple[tuple[float, float], ...]


class MemoryBounds:
    """Memory bounds of configurations.

    Args:
        folded: Returns the folded graph for a number of samples per microbatch.
        roofline: Roofline bounds on step time and bytes.
        costs: Cost model.
        constraints: Further constraints on plans.
        memory_limit: Bytes per device.
        global_batch: Samples per step.
    """

    def __init__(
        self,
        folded: Callable[[int], Folded],
        roofline: Roofline,
        costs: CostModel,
        constraints: Constraints,
        memory_limit: float,
        global_batch: int,
    ) -> None:
        self._folded, self._roofline, self._costs, self._constraints = folded, roofline, costs, constraints
        self._limit, self._batch = memory_limit, global_batch
        self._totals_by_flavour: dict[tuple[int, tuple[int, ...]], list[tuple[float, float]]] = {}
        self._recompute_of: dict[Configuration, float] = {}
        self._end_passes_of: dict[tuple[int, tuple[int, ...]], tuple[tuple[float, ...], tuple[float, ...]]] = {}
        self._blocks_of: dict[tuple[int, Mesh], _Block] = {}
        self._saved_bytes_of: dict[int, float] = {}

    def recompute_seconds(self, configuration: Configuration) -> float:
        """Least recompute seconds of a microbatch over all stages; infinity if nothing fits."""
        if math.isinf(self._limit) or not self._flavours:
            return 0.0
        if configuration not in self._recompute_of:
            self._recompute_of[configuration] = self._least_recompute(configuration)
        return self._recompute_of[configuration]

    def seems_to_fit(self, configuration: Configuration) -> bool:
        """Whether evenly divided saved values seem to fit without recompute: an estimate, not a bound.

        Saved bytes are interpolated between the two microbatch sizes of the roofline: they are linear in the samples,
        and graphs of other sizes take up to a second each.
        """
        resident = self._roofline_bytes(configuration)
        few, many = self._roofline.samples
        at_few, at_many = self._saved_bytes(few), self._saved_bytes(many)
        share = (self._samples(configuration) - few) / max(1, many - few)
        saved = at_few + share * (at_many - at_few)
        return resident + self._folded(few).buffer_bytes + saved / configuration.mesh.size <= self._limit

    def _saved_bytes(self, samples: int) -> float:
        """Return the bytes that all blocks save of a microbatch."""
        if samples not in self._saved_bytes_of:
            folded = self._folded(samples)
            self._saved_bytes_of[samples] = sum(
                kind.count * value.bytes
                for kind in folded.kinds
                for value in saved_by(folded, self._costs, kind.id)
                if value.memory is not Memory.HANDED  # counted at the block that produces it
            )
        return self._saved_bytes_of[samples]

    def step_that_fits(self, configuration: Configuration, microbatch_bound: MicrobatchBound) -> float:
        """Lower bound on the step if blocks are distributed so that they fit; infinity if they never do.

        Args:
            configuration: The configuration.
            microbatch_bound: Lower bounds on a microbatch, without recompute.
        """
        if not self._may_be_short(configuration):
            return 0.0
        pass_seconds, kind = self._passes(configuration), main_kind(self._folded(self._samples(configuration)))
        block = float(pass_seconds[0].sum()) / kind.count
        if microbatch_bound.blocks:
            block = max(block, min(microbatch_bound.blocks[instance] for instance in kind.instances))
        load = self._load_of(configuration, block, max(microbatch_bound.seconds, float(pass_seconds.sum())))
        return self._step_seconds(configuration, block * least_step(*_order_of(configuration), load))

    def scheduled_step_that_fits(self, configuration: Configuration, microbatch_bound: MicrobatchBound) -> float:
        """Lower bound on the step as `step_that_fits`, with precedences between groups; 0 where it is not tighter.

        It is not where everything fits evenly, where the schedule has a closed form, and with too many stages.
        """
        pipeline, order = configuration.pipeline(self._costs.stack), _order_of(configuration)
        if pipeline.fills or pipeline.num_stages > MOST_STAGES or not self._may_be_short(configuration):
            return 0.0
        pass_seconds, kind = self._passes(configuration), main_kind(self._folded(self._samples(configuration)))
        passes = pass_seconds[0] / pass_seconds[0].sum()
        if not order[0].splits:
            passes = np.array([passes[0], passes[1:].sum()])
        block = float(pass_seconds[0].sum()) / kind.count
        load = self._load_of(configuration, block, max(microbatch_bound.seconds, float(pass_seconds.sum())))
        if fits_evenly(*order, load):
            return 0.0
        return self._step_seconds(configuration, block * least_scheduled_step(*order, load, passes.tolist()))

    def cut_lp_applies(self, configuration: Configuration) -> bool:
        """Whether the cut LP applies: a pipeline that trains, limited memory, at most `MOST_CUT_STAGES` stages."""
        is_limited = math.isfinite(self._limit) and bool(self._flavours)
        num_stages = configuration.num_stages * configuration.num_chunks
        return (
            configuration.num_stages > 1
            and is_limited
            and SCHEDULES[configuration.schedule].trains
            and num_stages <= MOST_CUT_STAGES
        )

    def order(self, configuration: Configuration) -> TaskOrder:
        """Return the order of the tasks of a configuration."""
        return TaskOrder(*_order_of(configuration))

    def remaining_costs(self, configuration: Configuration, microbatch_bound: MicrobatchBound) -> RemainingCosts:
        """Return lower bounds on everything the step needs besides its repeated blocks."""
        folded = self._folded(self._samples(configuration))
        repeated, others = self._passes(configuration)
        load, count = self._load_of(configuration, 1.0, 0.0), main_kind(folded).count
        halves = float(repeated[1]) / count, float(repeated[2]) / count
        pipeline, main = configuration.pipeline(self._costs.stack), main_kind(folded).id
        other_blocks = [
            0.0 if kind == main else seconds
            for kind, seconds in zip(folded.chain, microbatch_bound.blocks, strict=False)
        ]
        return RemainingCosts(
            blocks=count,
            late=load.late,
            halves=halves,
            seconds=max(float(others.sum()), sum(other_blocks)),
            resident=load.others,
            whole=microbatch_bound.seconds,
            outer=_stages_without(folded.chain, main),
            ends=self._end_passes(configuration),
            edges=(other_blocks[0], other_blocks[-1]) if other_blocks else (0.0, 0.0),
            received=self._received_shares(configuration),
            hop=self._message_seconds(configuration),
            turns=pipeline.with_turns,
            fixed=pipeline.fixed,
        )

    def _end_passes(self, configuration: Configuration) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Least seconds of each pass of the first and of the last block; 0 if it is a repeated block."""
        samples, mesh, schedule = self._samples(configuration), configuration.mesh, SCHEDULES[configuration.schedule]
        key = samples, mesh.shape
        if key not in self._end_passes_of:
            folded, passes = self._folded(samples), []
            for place in (0, -1):
                kind = folded.kinds[folded.chain[place]]
                is_single = kind.count == 1 and kind is not main_kind(folded)
                ops = frozenset(op.name for op in kind.ops) if is_single else frozenset[str]()
                passes.append(tuple(self._roofline.passes_of(ops, mesh, samples).tolist()))
            self._end_passes_of[key] = passes[0], passes[1]
        first, last = self._end_passes_of[key]
        if schedule.splits:
            return first, last
        return (first[0], sum(first[1:])), (last[0], sum(last[1:]))

    def _received_shares(self, configuration: Configuration) -> tuple[float, float]:
        """Least bytes that a running stage receives from its two neighbours, as shares of a device."""
        folded, shape = self._folded(self._samples(configuration)), configuration.mesh.shape
        device_bytes = max(1.0, self._limit - folded.buffer_bytes)
        arriving, returning = (
            sum(memory.least(shape) for memory in values) / device_bytes
            for values in received_values(folded, self._costs, main_kind(folded).id)
        )
        return arriving, returning

    def _message_seconds(self, configuration: Configuration) -> float:
        """Least seconds of a message between groups, wherever the chain is cut."""
        folded = self._folded(self._samples(configuration))
        size, shape = configuration.mesh.size, configuration.mesh.shape
        last = (configuration.num_stages - 1) * size
        cluster = configuration.cluster(self._costs.cluster)
        tiers = {cluster.boundary_tier(start, size) for start in range(0, last, size)}
        least_bytes = min(
            sum(value.least(shape) for value in received_values(folded, self._costs, kind)[way])
            for way, kinds in enumerate((folded.chain[1:], folded.chain[:-1]))
            for kind in set(kinds)
        )
        return min(self._costs.send_seconds(least_bytes, tier) for tier in tiers)

    def _may_be_short(self, configuration: Configuration) -> bool:
        """Whether memory is limited, and several groups train."""
        is_limited = not math.isinf(self._limit) and bool(self._flavours)
        is_pipeline = configuration.num_stages > 1 and SCHEDULES[configuration.schedule].trains
        return is_limited and is_pipeline and bool(self._passes(configuration)[0].any())

    def _samples(self, configuration: Configuration) -> int:
        return self._batch // configuration.num_microbatches

    def _passes(self, configuration: Configuration) -> FloatArray:
        return self._roofline.passes_seconds(configuration.mesh, self._samples(configuration))

    def _step_seconds(self, configuration: Configuration, seconds: float) -> float:
        """Seconds of a step whose tasks take `seconds`, with the overheads of the schedule."""
        pipeline = configuration.pipeline(self._costs.stack)
        return pipeline.with_turns * seconds + pipeline.fixed

    def _load_of(self, configuration: Configuration, block: float, seconds: float) -> PipelineLoad:
        """Blocks in units of `block` seconds and shares of a device, given the least seconds of all passes."""
        samples, mesh = self._samples(configuration), configuration.mesh
        key = samples, mesh
        if key not in self._blocks_of:
            self._blocks_of[key] = self._block_bytes(configuration)
        bytes_of_block = self._blocks_of[key]
        resident, totals = self._resident_bytes(configuration), self._flavour_totals(samples, mesh)
        turns = configuration.pipeline(self._costs.stack).with_turns  # turns lengthen the step, not the link seconds
        return PipelineLoad(
            blocks=bytes_of_block.count,
            rest=max(0.0, seconds / block - bytes_of_block.count),
            recompute=tuple(recompute / bytes_of_block.count / block for _, recompute in totals),
            kept=tuple(nbytes / bytes_of_block.count / bytes_of_block.device_bytes for nbytes, _ in totals),
            late=bytes_of_block.late,
            resident=bytes_of_block.resident,
            others=max(
                0.0, resident / bytes_of_block.device_bytes - bytes_of_block.count * bytes_of_block.least_resident
            ),
            received=bytes_of_block.received if configuration.num_stages > 1 else (0.0, 0.0),
            outer=bytes_of_block.outer,
            alternatives=tuple(
                (resident_share, link / block / turns) for resident_share, link in bytes_of_block.alternatives
            ),
        )

    def _block_bytes(self, configuration: Configuration) -> _Block:
        """Bytes of a block of the most frequent kind on the mesh and with the samples of a configuration."""
        shape, offload = configuration.mesh.shape, self._constraints.hosts_optimizer
        folded = self._folded(self._samples(configuration))
        main = main_kind(folded)
        device_bytes = max(1.0, self._limit - folded.buffer_bytes)  # at least a byte, to divide by
        states = () if self._constraints.hosts_sums else resident_states(folded, self._costs, offload=offload)
        least = sum(memory.least(shape) for memory in states)
        deferred = sum(memory.least(shape) for memory in deferred_values(folded, self._costs))
        unsharded, alternatives = self._resident_options(configuration, least)
        return _Block(
            count=main.count,
            device_bytes=device_bytes,
            least_resident=least / device_bytes,
            resident=unsharded / device_bytes,
            late=deferred / device_bytes,
            received=self._received_shares(configuration),
            outer=_stages_without(folded.chain, main.id),
            alternatives=tuple((nbytes / device_bytes, link) for nbytes, link in alternatives),
        )

    def _resident_options(
        self, configuration: Configuration, least: float
    ) -> tuple[float, tuple[tuple[float, float], ...]]:
        """Resident bytes of a block if nothing is communicated in microbatches, and alternatives with link seconds.

        Where the data-parallel major axis leaves nodes, parameters and gradient sums that it shards are communicated in
        every microbatch.

        Args:
            configuration: The configuration.
            least: Resident bytes with the most shards of everything.
        """
        mesh, folded = configuration.mesh, self._folded(self._samples(configuration))
        if not is_data_major(mesh) or not leaves_node(mesh.axes[0], self._costs.cluster.devices_per_node):
            return least, ()
        states = sharded_states(folded, self._costs)
        savings = []
        for collective in dict.fromkeys(state.collective for state in states):
            rate = self._costs.collective_seconds(collective, LARGE_MESSAGE, mesh.axes[0]) / LARGE_MESSAGE
            freed = link = 0.0
            for state in states:
                if state.collective is collective:
                    free = max(most_shards(shape, mesh.shape[1:]) for shape in state.storage.shapes)
                    freed += state.storage.least(mesh.shape[1:]) - state.storage.least(mesh.shape)
                    link += rate * state.per_microbatch * state.wire / free
            savings.append((freed, link))
        unsharded = least + sum(freed for freed, _ in savings)
        subsets = [subset for size in range(1, len(savings) + 1) for subset in combinations(savings, size)]
        return unsharded, tuple(
            (unsharded - sum(saving[0] for saving in subset), sum(saving[1] for saving in subset)) for subset in subsets
        )

    def _resident_bytes(self, configuration: Configuration) -> float:
        """Least resident bytes of one device per group, summed over groups."""
        return configuration.num_stages * self._roofline_bytes(configuration)

    def _roofline_bytes(self, configuration: Configuration) -> float:
        """Least resident bytes of a device; 0 if even sums of gradients may lie in host memory."""
        if self._constraints.hosts_sums:
            return 0.0
        return self._roofline.bytes(configuration, offload=self._constraints.hosts_optimizer)

    def _least_recompute(self, configuration: Configuration) -> float:
        """Solve the fractional knapsack for two mean stages; return the greater optimum."""
        samples = self._samples(configuration)
        totals = self._flavour_totals(samples, configuration.mesh)
        groups = configuration.num_stages
        resident = self._resident_bytes(configuration)
        room = self._limit - self._folded(samples).buffer_bytes
        weights = _stage_weights(
            configuration.schedule, groups, configuration.num_microbatches, configuration.num_chunks
        )
        return max(
            _fractional_knapsack((room - resident * resident_weight) / kept_weight, totals)
            for resident_weight, kept_weight in weights
        )

    @property
    def _flavours(self) -> tuple[Recompute, ...]:
        """Recompute flavours; none where activations may be offloaded, so that nothing need be recomputed."""
        return () if Hosted.ACTIVATIONS in self._constraints.hosted else self._constraints.flavours()

    def _flavour_totals(self, samples: int, mesh: Mesh) -> list[tuple[float, float]]:
        """By flavour, kept bytes and recompute seconds of a microbatch in all blocks of the most frequent kind.

        Bytes are those of one device of each stage, summed over stages.
        """
        key = samples, mesh.shape
        if key not in self._totals_by_flavour:
            folded = self._folded(samples)
            kind = main_kind(folded)
            bytes_by_memory = dict.fromkeys(Memory, 0.0)
            for value in saved_by_main(folded, self._costs):
                shards = mesh.size if value.shape is None else most_shards(value.shape, mesh.shape)
                bytes_by_memory[value.memory] += kind.count * value.bytes / shards
            recomputed = {flavour: self._recomputed_ops(folded, flavour) for flavour in self._flavours}
            self._totals_by_flavour[key] = [
                (
                    sum(bytes_by_memory[memory] for memory in KEPT[flavour]),
                    self._roofline.seconds_of(names, mesh, samples),
                )
                for flavour, names in recomputed.items()
            ]
        return self._totals_by_flavour[key]

    def _recomputed_ops(self, folded: Folded, flavour: Recompute) -> frozenset[str]:
        """Names of the ops that a block of the most frequent kind recomputes."""
        kind = main_kind(folded)
        if flavour is Recompute.FULL:
            return frozenset(op.name for op in kind.ops if is_forward(op))
        if flavour is Recompute.SELECTIVE:
            return frozenset(kind.ops[position].name for position in selective_ops(folded, self._costs)[kind.id])
        return frozenset()


def _stages_without(chain: Sequence[int], main: int) -> tuple[int, int]:
    """Number of stages at both ends of a chain that may have no block of a kind; all if the kind is not contiguous.

    >>> _stages_without([0, 1, 1, 1, 2, 3], 1), _stages_without([0, 1, 2, 1], 1)
    ((1, 2), (4, 4))
    """
    positions = [place for place, kind in enumerate(chain) if kind == main]
    first, last = positions[0], len(chain) - 1 - positions[-1]
    return (first, last) if len(positions) + first + last == len(chain) else (len(chain), len(chain))


def _order_of(configuration: Configuration) -> tuple[Schedule, int, int, int]:
    """Schedule, groups, microbatches and chunks of a configuration."""
    schedule = SCHEDULES[configuration.schedule]
    return schedule, configuration.num_stages, configuration.num_microbatches, configuration.num_chunks


@lru_cache(maxsize=4096)
def _stage_weights(
    schedule: str, num_groups: int, num_microbatches: int, num_chunks: int
) -> tuple[tuple[float, float], ...]:
    """Weights of resident and of kept bytes in two mean stages, as of `stage_weights`."""
    pipeline = Pipeline(num_groups * num_chunks, num_microbatches, schedule, num_chunks=num_chunks)
    return tuple(stage_weights(pipeline, range(pipeline.num_groups), evenly=evenly) for evenly in (False, True))


def _fractional_knapsack(room: float, blocks: Sequence[tuple[float, float]]) -> float:
    """Least mean of seconds over mixtures of flavours with a mean of bytes within `room`; infinity if none fits.

    An optimal mixture has at most two flavours (Dantzig, 1957).

    >>> [_fractional_knapsack(room, [(10.0, 0.0), (6.0, 1.0), (2.0, 3.0)]) for room in (12, 8, 6, 3, 1)]
    [0.0, 0.5, 1.0, 2.5, inf]
    """
    fitting = [seconds for nbytes, seconds in blocks if nbytes <= room]
    mixtures = [
        low + (high - low) * (large - room) / (large - small)
        for large, low in blocks
        for small, high in blocks
        if small <= room < large
    ]
    return min([*fitting, *mixtures], default=math.inf)

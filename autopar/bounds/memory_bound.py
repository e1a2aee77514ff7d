"""What blocks run again at least because what they keep does not fit otherwise, before anything is formulated.

On n devices a value takes at least one n-th of its bytes, more where axes of the mesh divide none of its dims. With k_f
the bytes that a block of the most frequent kind keeps so at least under flavour f of recompute, and a_f the seconds
that it runs again at least, shares x_f of these blocks take

    min sum_f x_f a_f   such that   r + c sum_f x_f k_f <= limit,   sum_f x_f = 1

more than they would without recompute: r are the resident bytes of a mean stage and c is how many microbatches of how
many blocks it holds at least (`mean_bytes`). Other kinds of blocks keep nothing here. What a microbatch takes without
recompute is a bound of its own; both add up, for recompute is added to backwards.

What no mean of stages says is where blocks can be: some schedules hold more than fits of evenly cut stages, some of it
whatever runs again. A linear program spreads blocks over groups (`bounds/memory_lp.py`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np

from autopar.bounds.cut_lp import MOST_SPREAD, Order, Rest
from autopar.bounds.memory_lp import MOST_STAGES, Load, fits_evenly, least_crowded, least_ordered
from autopar.bounds.microbatch import Pace
from autopar.bounds.roofline import FloatArray, Floor
from autopar.bounds.saved_values import kept, kept_by, main_kind, most_shards, put_off, received, sent, states
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

MUCH = 1e15
"""Bytes of a collective that takes no more per byte than any smaller one."""


@dataclass(frozen=True, slots=True)
class _Block:
    """What blocks of the most frequent kind hold on a mesh, whatever the order of tasks; shares of a device.

    Attributes:
        count: How many there are.
        room: Bytes of a device.
        least: What one holds through the step if everything is divided as far as the axes divide it.
        resident: That if nothing travels in microbatches.
        late: What it puts off of a microbatch until its weight pass.
        received: What a stage receives meanwhile from the one before, and from the next one.
        outer: How many of the first and of the last stages may have none of these blocks.
        thrifty: Other ways to lie: what a block holds through the step then, and for how many seconds of a microbatch
            it has a link.
    """

    count: int
    room: float
    least: float
    resident: float
    late: float
    received: tuple[float, float]
    outer: tuple[int, int]
    thrifty: tuple[tuple[float, float], ...]


class Room:
    """Knows what has to run again.

    Args:
        folded: Returns the folded graph for a number of samples per microbatch.
        floor: Floor under step times and bytes.
        costs: Cost model.
        constraints: What else plans have to keep to.
        memory_limit: Bytes per device.
        global_batch: Samples per step.
    """

    def __init__(
        self,
        folded: Callable[[int], Folded],
        floor: Floor,
        costs: CostModel,
        constraints: Constraints,
        memory_limit: float,
        global_batch: int,
    ) -> None:
        self._folded, self._floor, self._costs, self._constraints = folded, floor, costs, constraints
        self._limit, self._batch = memory_limit, global_batch
        self._known: dict[tuple[int, tuple[int, ...]], list[tuple[float, float]]] = {}
        self._found: dict[Configuration, float] = {}
        self._edges: dict[tuple[int, tuple[int, ...]], tuple[tuple[float, ...], tuple[float, ...]]] = {}
        self._each: dict[tuple[int, Mesh], _Block] = {}
        self._kept: dict[int, float] = {}

    def again(self, configuration: Configuration) -> float:
        """Return the least seconds that a microbatch runs again in all stages together; infinity if nothing fits."""
        if math.isinf(self._limit) or not self._flavours:
            return 0.0
        if configuration not in self._found:
            self._found[configuration] = self._least(configuration)
        return self._found[configuration]

    def seems_roomy(self, configuration: Configuration) -> bool:
        """Whether a device seems to have room for all that blocks keep, evenly divided: no bound, but a guess."""
        samples = self._samples(configuration)
        folded = self._folded(samples)
        if samples not in self._kept:  # meshes are many, graphs few
            self._kept[samples] = sum(
                kind.count * own.bytes
                for kind in folded.kinds
                for own in kept_by(folded, self._costs, kind.id)
                if own.memory is not Memory.HANDED  # which the block that makes it keeps, too
            )
        resident = self._floor.bytes(configuration, offload=self._constraints.hosts_optimizer)
        return resident + folded.buffer_bytes + self._kept[samples] / configuration.mesh.size <= self._limit

    def crowded(self, configuration: Configuration, pace: Pace) -> float:
        """Return the least seconds of a step whose blocks are spread so that they fit; infinity if they never do.

        Args:
            configuration: The configuration.
            pace: What a microbatch takes at least, without recompute.
        """
        if not self._is_short(configuration):
            return 0.0
        least, kind = self._passes(configuration), main_kind(self._folded(self._samples(configuration)))
        block = float(least[0].sum()) / kind.count
        if pace.blocks:
            block = max(block, min(pace.blocks[instance] for instance in kind.instances))
        load = self._load(configuration, block, max(pace.seconds, float(least.sum())))
        return self._step(configuration, block * least_crowded(*_order(configuration), load))

    def ordered(self, configuration: Configuration, pace: Pace) -> float:
        """Return the same with what groups wait for each other; 0 where that says nothing more.

        So it is where all fits anyway, with a closed form, and if there are too many tasks to look at.
        """
        pipeline, order = configuration.pipeline(self._costs.stack), _order(configuration)
        if pipeline.fills or pipeline.num_stages > MOST_STAGES or not self._is_short(configuration):
            return 0.0
        least, kind = self._passes(configuration), main_kind(self._folded(self._samples(configuration)))
        passes = least[0] / least[0].sum()
        if not order[0].splits:
            passes = np.array([passes[0], passes[1:].sum()])
        block = float(least[0].sum()) / kind.count
        load = self._load(configuration, block, max(pace.seconds, float(least.sum())))
        if fits_evenly(*order, load):
            return 0.0
        return self._step(configuration, block * least_ordered(*order, load, passes.tolist()))

    def spreads(self, configuration: Configuration) -> bool:
        """Whether blocks of a configuration may be spread over stages (`rest`): memory binds, without a closed form."""
        closed = configuration.pipeline(self._costs.stack).fills or configuration.num_stages == 1
        limited = math.isfinite(self._limit) and bool(self._flavours)
        stages = configuration.num_stages * configuration.num_chunks
        return not closed and limited and SCHEDULES[configuration.schedule].trains and stages <= MOST_SPREAD

    def order(self, configuration: Configuration) -> Order:
        """Return the order of the tasks of a configuration."""
        return Order(*_order(configuration))

    def rest(self, configuration: Configuration, pace: Pace) -> Rest:
        """Return what there is at least besides what blocks of the most frequent kind take."""
        folded = self._folded(self._samples(configuration))
        alike, others = self._passes(configuration)
        load, count = self._load(configuration, 1.0, 0.0), main_kind(folded).count
        halves = float(alike[1]) / count, float(alike[2]) / count
        pipeline, main = configuration.pipeline(self._costs.stack), main_kind(folded).id
        beside = [0.0 if kind == main else own for kind, own in zip(folded.chain, pace.blocks, strict=False)]
        return Rest(
            blocks=count,
            late=load.late,
            halves=halves,
            seconds=max(float(others.sum()), sum(beside)),
            resident=load.others,
            whole=pace.seconds,
            outer=_outer(folded.chain, main),
            ends=self._ends(configuration),
            edges=(beside[0], beside[-1]) if beside else (0.0, 0.0),
            received=self._received(configuration),
            hop=self._hop(configuration),
            turns=pipeline.with_turns,
            fixed=pipeline.fixed,
        )

    def _ends(self, configuration: Configuration) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the least seconds of each pass of the first and of the last block; 0 of the most frequent kind."""
        samples, mesh, schedule = self._samples(configuration), configuration.mesh, SCHEDULES[configuration.schedule]
        key = samples, mesh.shape
        if key not in self._edges:
            folded, found = self._folded(samples), []
            for place in (0, -1):
                kind = folded.kinds[folded.chain[place]]
                alone = kind.count == 1 and kind is not main_kind(folded)
                names = frozenset(op.name for op in kind.ops) if alone else frozenset[str]()
                found.append(tuple(self._floor.passes_of(names, mesh, samples).tolist()))
            self._edges[key] = found[0], found[1]
        first, last = self._edges[key]
        if schedule.splits:
            return first, last
        return (first[0], sum(first[1:])), (last[0], sum(last[1:]))

    def _received(self, configuration: Configuration) -> tuple[float, float]:
        """Return what a stage receives at least from its neighbours while it runs, as shares of a device."""
        folded, shape = self._folded(self._samples(configuration)), configuration.mesh.shape
        room = max(1.0, self._limit - folded.buffer_bytes)
        arriving, returning = (
            sum(memory.least(shape) for memory in own) / room
            for own in received(folded, self._costs, main_kind(folded).id)
        )
        return arriving, returning

    def _hop(self, configuration: Configuration) -> float:
        """Return the least seconds of a message from a group to another, wherever the chain is cut."""
        folded, size, shape = (
            self._folded(self._samples(configuration)),
            configuration.mesh.size,
            configuration.mesh.shape,
        )
        last = (configuration.num_stages - 1) * size
        tiers = {self._costs.cluster.boundary_tier(start, size) for start in range(0, last, size)}
        least = min(
            sum(memory.least(shape) for memory in received(folded, self._costs, kind)[way])
            for way, kinds in enumerate((folded.chain[1:], folded.chain[:-1]))
            for kind in set(kinds)
        )
        return min(self._costs.send_seconds(least, tier) for tier in tiers)

    def _is_short(self, configuration: Configuration) -> bool:
        """Whether memory is limited, and several groups wait for each other."""
        limited = not math.isinf(self._limit) and bool(self._flavours)
        several = configuration.num_stages > 1 and SCHEDULES[configuration.schedule].trains
        return limited and several and bool(self._passes(configuration)[0].any())

    def _samples(self, configuration: Configuration) -> int:
        return self._batch // configuration.num_microbatches

    def _passes(self, configuration: Configuration) -> FloatArray:
        return self._floor.passes_seconds(configuration.mesh, self._samples(configuration))

    def _step(self, configuration: Configuration, seconds: float) -> float:
        """Return the seconds of a step whose tasks take so long."""
        pipeline = configuration.pipeline(self._costs.stack)
        return pipeline.with_turns * seconds + pipeline.fixed

    def _load(self, configuration: Configuration, block: float, seconds: float) -> Load:
        """Return the blocks as shares of a device and of what one takes, given the least seconds of all passes."""
        samples, mesh = self._samples(configuration), configuration.mesh
        key = samples, mesh
        if key not in self._each:
            self._each[key] = self._block(configuration)
        of = self._each[key]
        resident, blocks = self._resident(configuration), self._blocks(samples, mesh)
        turns = configuration.pipeline(self._costs.stack).with_turns  # a step is so many times as long, links are not
        return Load(
            blocks=of.count,
            rest=max(0.0, seconds / block - of.count),
            again=tuple(again / of.count / block for _, again in blocks),
            kept=tuple(nbytes / of.count / of.room for nbytes, _ in blocks),
            late=of.late,
            resident=of.resident,
            others=max(0.0, resident / of.room - of.count * of.least),
            received=of.received if configuration.num_stages > 1 else (0.0, 0.0),
            outer=of.outer,
            thrifty=tuple((held, link / block / turns) for held, link in of.thrifty),
        )

    def _block(self, configuration: Configuration) -> _Block:
        """Return what blocks of the most frequent kind hold on the mesh of a configuration, with as many samples."""
        shape, offload = configuration.mesh.shape, self._constraints.hosts_optimizer
        folded = self._folded(self._samples(configuration))
        main, room = main_kind(folded), max(1.0, self._limit - folded.buffer_bytes)  # a byte if there is none
        least = sum(memory.least(shape) for memory in states(folded, self._costs, offload=offload))
        late = sum(memory.least(shape) for memory in put_off(folded, self._costs))
        own, thrifty = self._ways(configuration, least)
        return _Block(
            count=main.count,
            room=room,
            least=least / room,
            resident=own / room,
            late=late / room,
            received=self._received(configuration),
            outer=_outer(folded.chain, main.id),
            thrifty=tuple((held / room, link) for held, link in thrifty),
        )

    def _ways(self, configuration: Configuration, least: float) -> tuple[float, tuple[tuple[float, float], ...]]:
        """Return what a block holds through the step if nothing travels in microbatches, and what it may hold else.

        Passes use parameters that a data-parallel major axis does not shard, and make terms of whole gradients on it:
        what lies in shards on it has it each time, for so many seconds at least.

        Args:
            configuration: The configuration.
            least: What it holds if everything is divided as far as the axes divide it.
        """
        mesh, folded = configuration.mesh, self._folded(self._samples(configuration))
        if not is_data_major(mesh) or not leaves_node(mesh.axes[0], self._costs.cluster.devices_per_node):
            return least, ()
        own = sent(folded, self._costs)
        parts = []
        for collective in dict.fromkeys(each.collective for each in own):
            rate = self._costs.collective_seconds(collective, MUCH, mesh.axes[0]) / MUCH
            held = link = 0.0
            for each in own:
                if each.collective is collective:
                    free = max(most_shards(shape, mesh.shape[1:]) for shape in each.memories.shapes)
                    held += each.memories.least(mesh.shape[1:]) - each.memories.least(mesh.shape)
                    link += rate * each.times * each.wire / free
            parts.append((held, link))
        whole = least + sum(held for held, _ in parts)
        chosen = [some for size in range(1, len(parts) + 1) for some in combinations(parts, size)]
        return whole, tuple((whole - sum(own[0] for own in some), sum(own[1] for own in some)) for some in chosen)

    def _resident(self, configuration: Configuration) -> float:
        """Return the least bytes that one device of each group holds through the step, together."""
        offload = self._constraints.hosts_optimizer
        return configuration.num_stages * self._floor.bytes(configuration, offload=offload)

    def _least(self, configuration: Configuration) -> float:
        """As `again`, by the formula."""
        samples = self._samples(configuration)
        blocks = self._blocks(samples, configuration.mesh)
        groups = configuration.num_stages
        resident = self._resident(configuration)
        room = self._limit - self._folded(samples).buffer_bytes
        weights = _weights(configuration.schedule, groups, configuration.num_microbatches, configuration.num_chunks)
        return max(_least_again((room - resident * held) / flying, blocks) for held, flying in weights)

    @property
    def _flavours(self) -> tuple[Recompute, ...]:
        """What blocks may recompute; none where they may keep nothing on the device without running anything again."""
        return () if Hosted.ACTIVATIONS in self._constraints.hosted else self._constraints.flavours()

    def _blocks(self, samples: int, mesh: Mesh) -> list[tuple[float, float]]:
        """Return by flavour what all blocks of the most frequent kind keep and run again at least of a microbatch.

        These are bytes of a device of each stage and seconds, of all stages together.
        """
        key = samples, mesh.shape
        if key not in self._known:
            folded = self._folded(samples)
            kind = main_kind(folded)
            keeps = dict.fromkeys(Memory, 0.0)
            for own in kept(folded, self._costs):
                shards = mesh.size if own.shape is None else most_shards(own.shape, mesh.shape)
                keeps[own.memory] += kind.count * own.bytes / shards
            ops = {flavour: self._ops(folded, flavour) for flavour in self._flavours}
            self._known[key] = [
                (sum(keeps[memory] for memory in KEPT[flavour]), self._floor.seconds_of(names, mesh, samples))
                for flavour, names in ops.items()
            ]
        return self._known[key]

    def _ops(self, folded: Folded, flavour: Recompute) -> frozenset[str]:
        """Return the ops of a block of the most frequent kind that run again."""
        kind = main_kind(folded)
        if flavour is Recompute.FULL:
            return frozenset(op.name for op in kind.ops if is_forward(op))
        if flavour is Recompute.SELECTIVE:
            return frozenset(kind.ops[position].name for position in selective_ops(folded, self._costs)[kind.id])
        return frozenset()


def _outer(chain: Sequence[int], main: int) -> tuple[int, int]:
    """Return how many stages at both ends of a chain may have no block of a kind; all, if others are in between.

    >>> _outer([0, 1, 1, 1, 2, 3], 1), _outer([0, 1, 2, 1], 1)
    ((1, 2), (4, 4))
    """
    places = [place for place, kind in enumerate(chain) if kind == main]
    first, last = places[0], len(chain) - 1 - places[-1]
    return (first, last) if len(places) + first + last == len(chain) else (len(chain), len(chain))


def _order(configuration: Configuration) -> tuple[Schedule, int, int, int]:
    """Return what says the order of tasks."""
    schedule = SCHEDULES[configuration.schedule]
    return schedule, configuration.num_stages, configuration.num_microbatches, configuration.num_chunks


@lru_cache(maxsize=4096)
def _weights(schedule: str, num_groups: int, num_microbatches: int, num_chunks: int) -> tuple[tuple[float, float], ...]:
    """Return how often resident bytes and those of a microbatch count in two mean stages, as of `stage_weights`."""
    pipeline = Pipeline(num_groups * num_chunks, num_microbatches, schedule, num_chunks=num_chunks)
    return tuple(stage_weights(pipeline, range(pipeline.num_groups), evenly=evenly) for evenly in (False, True))


def _least_again(room: float, blocks: Sequence[tuple[float, float]]) -> float:
    """Return the least mean of seconds whose mean of bytes is no more than there is room for; infinity if none is.

    >>> [_least_again(room, [(10.0, 0.0), (6.0, 1.0), (2.0, 3.0)]) for room in (12, 8, 6, 3, 1)]
    [0.0, 0.5, 1.0, 2.5, inf]
    """
    fitting = [seconds for nbytes, seconds in blocks if nbytes <= room]
    mixed = [
        low + (high - low) * (large - room) / (large - small)
        for large, low in blocks
        for small, high in blocks
        if small <= room < large
    ]
    return min([*fitting, *mixed], default=math.inf)

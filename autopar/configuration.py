"""The declared space: which (pipeline degree, mesh, microbatches) combinations are searched."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.cluster import Cluster, Numbering
from autopar.cost import CostModel, Overlap, Stack
from autopar.errors import JobError
from autopar.formulate.data_major import DATA_MAJOR, is_data_major
from autopar.formulate.step_time import Pipeline
from autopar.recompute import ON_DEVICE, Hosted, Recompute
from autopar.schedule import SCHEDULES
from autopar.sharding import Mesh
from autopar.shares import Share
from autopar.units import format_seconds

GROUP_NODES = 4
"""Nodes that the two free axes of a mesh of three span at most."""

NEIGHBOURS = 8
"""Devices that the minor axis of a mesh has at most where nodes have fewer: tensor parallelism of eight is customary,
and over nodes of one or two devices it leaves them."""

PLAIN = frozenset({"1f1b", "gpipe", "forward-only"})
"""Schedules in which a pass goes through all groups of devices before the last one is busy."""

_TURNS = ("interleaved", "1f1b-a2a")
"""Schedules with any number of stages per group of devices."""


_INSIDE = frozenset({"1f1b", "forward-only", *_TURNS})
"""Schedules that are listed with data parallelism around pipelines: those of Megatron-LM, which lays them out so."""

Priced = tuple[Mesh, bool, int]
"""Configurations that share prices have equal meshes, schedules that hide the dispatch alike, and equal neighbours."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """One point of the outer space; everything else (placements, stage boundaries, recompute) is decided inside it.

    Attributes:
        num_stages: Pipeline degree.
        mesh: Devices of one stage.
        num_microbatches: Microbatches per step.
        schedule: Order of microbatches.
        num_chunks: Stages per group of devices, which take turns on it.
        block: Neighbouring devices of a stage where data parallelism lies around pipelines, as of
            `autopar.cluster.Numbering`; 0 where stages have consecutive devices.
        shares: Microbatches of each row of the mesh where rows lie on unequal devices; else empty.
    """

    num_stages: int
    mesh: Mesh
    num_microbatches: int
    schedule: str
    num_chunks: int = 1
    block: int = 0
    shares: tuple[Share, ...] = ()

    def __str__(self) -> str:
        turns = f" v={self.num_chunks}" if self.num_chunks > 1 else ""
        inside = " inside" if self.block else ""
        pipeline = f"pp={self.num_stages}{inside} mesh {self.mesh}"
        return f"{pipeline} {self.counts} microbatches {self.schedule}{turns}"

    @property
    def counts(self) -> str:
        """The microbatches per step in words, those of each share of rows."""
        return "+".join(str(share.num_microbatches) for share in self.shares) or str(self.num_microbatches)

    @property
    def words(self) -> str:
        """The configuration in the words of progress.

        >>> Configuration(4, Mesh.of(inner=2, outer=4), 16, "1f1b").words
        '4 pipeline stages of 8 GPUs, 16 microbatches, 1f1b'
        >>> Configuration(1, Mesh.of(inner=1), 1, "1f1b").words
        '1 GPU, 1 microbatch'
        """
        gpus, microbatches = _counted(self.mesh.size, "GPU"), _counted(self.num_microbatches, "microbatch", "es")
        if self.shares:
            microbatches = f"shares of {self.counts} microbatches"
        if self.num_stages == 1:
            return f"{gpus}, {microbatches}"
        turns = f" × {self.num_chunks}" if self.num_chunks > 1 else ""
        inside = " inside data parallelism" if self.block else ""
        return f"{self.num_stages}{turns} pipeline stages of {gpus}{inside}, {microbatches}, {self.schedule}"

    @property
    def hides_dispatch(self) -> bool:
        """Whether the schedule hides the all-to-all of experts, so that passes have other prices."""
        return SCHEDULES[self.schedule].hides_dispatch

    @property
    def priced(self) -> "Priced":
        """What the prices of passes depend on beside the samples."""
        return self.mesh, self.hides_dispatch, self.num_stages if self.block else 1

    def cluster(self, cluster: Cluster) -> Cluster:
        """Return a cluster with devices numbered as the stages have them."""
        return cluster.by_group(self.num_stages, self.mesh.size, self.block) if self.block else cluster

    def costs(self, costs: CostModel) -> CostModel:
        """Return the costs of passes under the schedule, on devices as the stages have them."""
        costs = costs.overlapped() if self.hides_dispatch else costs
        return replace(costs, cluster=self.cluster(costs.cluster)) if self.block else costs

    def pipeline(self, stack: Stack) -> Pipeline:
        """Return how a step is cut in time under a software stack."""
        stack = stack.overlapped() if self.hides_dispatch else stack
        return Pipeline(
            self.num_stages * self.num_chunks,
            self.num_microbatches,
            self.schedule,
            Overlap.of(stack),
            stack["step_seconds"],
            self.num_chunks,
            stack["interleave_overhead"],
        )


def _counted(number: int, noun: str, ending: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else ending}"


Family = tuple[Configuration, ...]
"""Configurations that differ in the schedule only."""


def families(space: Sequence[Configuration]) -> list[Family]:
    """Return the configurations that differ in the schedule only, together: placements are looked for once for all.

    Those with plain schedules are a family of their own, whose bound is tighter than that of the others, and so are
    those that split the backward, in which collectives have less to hide behind, those with several stages per group,
    which need not be neighbours, and those that hide the all-to-all of experts. Stages with other devices, too, have
    prices of their own.
    """
    found: dict[tuple[int, Priced, int, bool, bool, bool], list[Configuration]] = {}
    for each in space:
        own = SCHEDULES[each.schedule]
        kind = each.schedule in PLAIN, own.splits, each.num_chunks > 1
        found.setdefault((each.num_stages, each.priced, each.num_microbatches, *kind), []).append(each)
    return [tuple(family) for family in found.values()]


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def virtual_stages(num_groups: int, num_blocks: int) -> list[int]:
    """Return the numbers of interleaved stages per group of devices that are searched, in ascending order.

    For every power of two b, the list has the most stages of at least b blocks each: fewer stages of b blocks have the
    same longest stage and a longer bubble.

    >>> virtual_stages(8, 82), virtual_stages(4, 82), virtual_stages(16, 128), virtual_stages(8, 9)
    ([2, 5, 10], [2, 5, 10, 20], [2, 4, 8], [])
    """
    found, chunks = list[int](), num_blocks // num_groups
    while chunks > 1:
        found.append(chunks)
        chunks //= 2
    return found[::-1]


def meshes(num_devices: int, devices_per_node: int) -> Iterator[Mesh]:
    """Yield the meshes of one stage: one axis of all devices, and two of which the minor one lies within a node.

    Where nodes are small it may have up to `NEIGHBOURS` devices.

    Which axis does what is the solver's choice, so that an 8×8 mesh stands for 8-way data times 8-way tensor
    parallelism, for 64-way data parallelism and for anything between. The latter takes two collectives there, one per
    axis. Over one axis it takes one, whose rings run on the links within nodes and between them at once
    (`autopar.cost.collectives`), so that plans which do the same with all devices of a stage are best on one axis.

    >>> [str(mesh) for mesh in meshes(16, 8)]
    ['inner=16', 'outer=8×inner=2', 'outer=4×inner=4', 'outer=2×inner=8']
    >>> [str(mesh) for mesh in meshes(4, 8)], [str(mesh) for mesh in meshes(4, 1)]
    (['inner=4', 'outer=2×inner=2'], ['inner=4', 'outer=2×inner=2'])
    """
    yield Mesh.of(inner=num_devices)
    for inner in divisors(num_devices):
        if 1 < inner < num_devices and inner <= max(devices_per_node, NEIGHBOURS):
            yield Mesh.of(outer=num_devices // inner, inner=inner)


def data_major_meshes(num_devices: int, devices_per_node: int) -> Iterator[Mesh]:
    """Yield the meshes of three axes whose major one is data parallel (`autopar.formulate.data_major`).

    The two minor axes are free and span a few nodes at most: what takes more devices than that is data parallel.

    >>> [str(mesh) for mesh in data_major_meshes(16, 8)]
    ['dp=4×outer=2×inner=2', 'dp=2×outer=4×inner=2', 'dp=2×outer=2×inner=4']
    """
    for inner in divisors(num_devices):
        if not 1 < inner <= max(devices_per_node, NEIGHBOURS):
            continue
        for outer in divisors(num_devices // inner):
            dp = num_devices // (inner * outer)
            if outer > 1 and dp > 1 and inner * outer <= max(GROUP_NODES * devices_per_node, NEIGHBOURS):
                yield Mesh.of(**dict(zip(DATA_MAJOR, (dp, outer, inner), strict=True)))


def configurations(
    *,
    gpus: int,
    devices_per_node: int,
    num_blocks: int,
    global_batch: int,
    batch_of_model: int | None,
    mode: str,
    routes: bool = False,
    orders: bool = False,
) -> list[Configuration]:
    """Return the outer space of a job.

    Pipeline degrees are the divisors of the number of GPUs up to the number of blocks. Microbatch counts are the
    divisors of the global batch; on a mesh with a data-parallel axis those that leave it samples to split. Every
    schedule is listed where it makes a difference. One stage has nothing to order; one microbatch passes through GPipe
    as through 1F1B and through ZB-H2 as through ZB-H1. Interleaved stages need a whole number of rounds.

    Args:
        gpus: Number of devices.
        devices_per_node: Devices of one node of the cluster.
        num_blocks: Length of the chain of blocks.
        global_batch: Samples per step.
        batch_of_model: Samples the model insists on per microbatch, None if it takes any number.
        mode: "train" or "infer".
        routes: Whether there are tokens on their way to experts for schedules to hide.
        orders: Whether data parallelism may also lie around pipelines.

    Raises:
        JobError: If the batch cannot be cut to the model's.
    """
    if batch_of_model is not None:
        if global_batch % batch_of_model:
            raise JobError(
                f"the model works on {batch_of_model} samples at a time, which does not divide "
                f"the global batch {global_batch}",
                hint=f"--global-batch {-(-global_batch // batch_of_model) * batch_of_model}",
            )
        counts = [global_batch // batch_of_model]
    else:
        counts = divisors(global_batch)
    return [
        Configuration(num_stages, mesh, count, schedule, chunks, block)
        for num_stages in divisors(gpus)
        if num_stages <= num_blocks
        for mesh in (
            *meshes(gpus // num_stages, devices_per_node),
            *data_major_meshes(gpus // num_stages, devices_per_node),
        )
        for count in counts
        if not is_data_major(mesh) or global_batch // count % mesh.axes[0].size == 0
        for block in sorted({0, inside_block(num_stages, mesh, devices_per_node) * orders})
        for schedule, chunks in _schedules(mode, num_stages, count, num_blocks, routes=routes)
        if not block or schedule in _INSIDE
    ]


def inside_block(num_stages: int, mesh: Mesh, devices_per_node: int) -> int:
    """Return the neighbouring devices of a stage if data parallelism lies around pipelines: those of the minor axis.

    0 where pipelines cannot lie so, or each stage would have the devices that it has anyhow: all of a node, or all that
    it has. Meshes of three axes are left out.

    >>> [inside_block(4, mesh, 8) for mesh in (Mesh.of(outer=8, inner=2), Mesh.of(inner=16), Mesh.of(inner=2))]
    [2, 1, 0]
    """
    block = mesh.shape[-1] if len(mesh.axes) == 2 else 1
    crosses = num_stages > 1 and num_stages * mesh.size > devices_per_node
    if not crosses or len(mesh.axes) > 2 or block >= min(mesh.size, devices_per_node):
        return 0
    return block if Numbering(num_stages, mesh.size, block).in_node(devices_per_node) else 0


def first_tries(
    space: list[Configuration], global_batch: int, least_bytes: Callable[[Configuration], float]
) -> list[Configuration]:
    """Return per number of stages, from few to many, the configuration most like what is set up by hand.

    Its mesh divides parameters about as well as any and has two axes if it can, as many plans by hand do different
    things within rows of devices and across them; the minor axis is the largest there is, and a microbatch has about
    one sample for each row.

    Args:
        space: Configurations.
        global_batch: Samples per step.
        least_bytes: Returns the least that a device of a configuration holds of parameters and their like.
    """
    sizes = [least_bytes(configuration) for configuration in space]
    least: dict[int, float] = {}
    for configuration, size in zip(space, sizes, strict=True):
        least[configuration.num_stages] = min(size, least.get(configuration.num_stages, math.inf))

    def unlike(configuration: Configuration) -> tuple[float, ...]:
        *rows, inner = configuration.mesh.shape
        samples = global_batch / configuration.num_microbatches
        fewest = configuration.num_microbatches < configuration.num_stages
        return (not rows, -inner, fewest, abs(math.log(samples / math.prod(rows))))

    best: dict[int, Configuration] = {}
    for configuration, size in zip(space, sizes, strict=True):
        if size <= 2 * least[configuration.num_stages]:
            known = best.setdefault(configuration.num_stages, configuration)
            if unlike(configuration) < unlike(known):
                best[configuration.num_stages] = configuration
    return [best[stages] for stages in sorted(best)]


def fitting_try(
    space: list[Configuration], global_batch: int, seems_to_fit: Callable[[Configuration], bool]
) -> Configuration | None:
    """Return the configuration to try before all that is set up by hand; None if there is none of that kind.

    It has as few stages as seem to leave room for all that blocks keep, a sample or more for every device, so that data
    parallelism over all of them is among its plans, and as few microbatches as that allows. Its mesh is like those of
    `first_tries`.

    Args:
        space: Configurations.
        global_batch: Samples per step.
        seems_to_fit: Returns whether a device seems to have room for all that blocks keep.
    """

    def order(configuration: Configuration) -> tuple[float, ...]:
        *rows, inner = configuration.mesh.shape
        return (configuration.num_stages, not rows, -inner, configuration.num_microbatches)

    chosen: dict[int, Mesh] = {}
    for configuration in sorted(space, key=order):
        mesh = chosen.setdefault(configuration.num_stages, configuration.mesh)
        if configuration.mesh != mesh or global_batch < configuration.num_microbatches * mesh.size:
            continue
        if seems_to_fit(configuration):
            return configuration
    return None


def _schedules(
    mode: str, num_stages: int, num_microbatches: int, num_blocks: int, *, routes: bool
) -> Iterator[tuple[str, int]]:
    """Yield the schedules that make a difference, and their stages per group of devices."""
    if mode == "infer":
        yield "forward-only", 1
        return
    yield "1f1b", 1
    if num_stages == 1:
        if routes and num_microbatches > 1:
            yield "1f1b-a2a", 1
        return
    if num_microbatches > 1:
        yield "gpipe", 1
    yield "zb-h1", 1  # of one microbatch, too: the group before waits for half a backward
    if num_microbatches > 1:
        yield "zb-h2", 1
    if 2 * num_stages <= num_blocks:
        yield "zb-v", 2
        if routes and num_microbatches >= 2 * num_stages:
            yield "dualpipe-v", 2
    if num_microbatches % num_stages == 0:
        turns = ("interleaved", "1f1b-a2a") if routes else ("interleaved",)
        yield from ((name, chunks) for name in turns for chunks in virtual_stages(num_stages, num_blocks))


def describe(
    space: list[Configuration],
    flavours: Sequence[Recompute] = ON_DEVICE,
    *,
    hosts_optimizer: bool = False,
    num_nodes: int = 1,
) -> tuple[str, ...]:
    """Return the space in words, for the report.

    Args:
        space: The configurations.
        flavours: What blocks may keep of their forward.
        hosts_optimizer: Whether the optimizer's state may lie in host memory.
        num_nodes: Nodes that the devices lie in: of several it matters which devices a stage and an axis have.
    """
    alike = (
        "repeated layers share one sharding; tensors are not resharded between layers",
        "partial sums use one reduction type; each split dimension has one chunk count",
    )
    if not space:
        return alike
    stages = sorted({configuration.num_stages for configuration in space})
    counts = sorted({configuration.num_microbatches for configuration in space})
    chunks: dict[str, set[int]] = {}
    for c in space:
        chunks.setdefault(c.schedule, set()).add(c.num_chunks)
    turns = {name: f" (v = {', '.join(map(str, sorted(own)))})" for name, own in chunks.items() if name in _TURNS}
    where = " of consecutive devices" if num_nodes > 1 and stages[-1] > 1 else ""
    if any(configuration.block for configuration in space):
        where += ", or of rows or single devices of every node with data parallelism around pipelines"
    names = sorted(name + turns.get(name, "") for name in chunks)
    grids, data_major = (
        [
            "×".join(map(str, shape))
            for shape in sorted({c.mesh.shape for c in space if is_data_major(c.mesh) == wanted})
        ]
        for wanted in (False, True)
    )
    *others, last = [str(own) for own in flavours if own is not Recompute.OFFLOAD] or [str(Recompute.NONE)]
    recompute = f"{', '.join(others)} or {last} per block" if others else f"{last}"
    hosted = "activation offload per block, " if Recompute.OFFLOAD in flavours else ""
    hosted += "optimizer offload of the first blocks of a stage, " if hosts_optimizer else ""
    return (
        f"pipeline stages {', '.join(map(str, stages))}{where}, cut at any block; schedule {', '.join(names)}",
        f"meshes of a stage {', '.join(grids)}; every discovered sharding of every op on every axis",
        *_data_major_words(data_major, num_nodes),
        *_left_out_words(space, data_major),
        f"microbatches {', '.join(map(str, counts))}; recompute {recompute}",
        *((f"{hosted}each device up to its share of its host's memory",) if hosted else ()),
        *alike,
    )


def closed_words(closed: Sequence[Configuration], floor: float) -> tuple[str, ...]:
    """Return what is said of configurations that are left, most of them on meshes of three axes; `floor` in seconds."""
    if not closed:
        return ()
    where = "on meshes of three axes whose major one is data parallel"
    if not all(is_data_major(own.mesh) for own in closed):
        around = sum(own.block > 0 for own in closed)
        words = f", with data parallelism around pipelines ({around})" if around else ""
        where += f" ({sum(is_data_major(own.mesh) for own in closed)}){words} and of schedules that are not plain"
    return (
        f"not searched to the end: {len(closed)} configurations {where}; no plan there is faster than "
        f"{format_seconds(floor)}, which the gap takes into account",
    )


def left_words(left: int) -> tuple[str, ...]:
    """Return what is said of configurations that were put aside; `left` is their number."""
    if not left:
        return ()
    skipped = "1 configuration was" if left == 1 else f"{left} configurations were"
    return (
        f"{skipped} skipped as unpromising; the bound holds (with --time-limit the search goes on with what is left)",
    )


def hosted_words(
    needed: Collection[Hosted], reserve: Collection[Hosted], floor: float, *, restaged: bool = False
) -> tuple[str, ...]:
    """Return what is said of host memory where it was opened in need, or not at all.

    Args:
        needed: What may lie there since nothing was found that fits without.
        reserve: What may not, since something was.
        floor: Seconds that a plan with that takes at least.
        restaged: Whether it was tried on the placements of the best plans.
    """
    found = []
    if needed:
        found.append(f"CPU offload of {_offloads(needed)} was tried because no plan was found that fits without it")
    if reserve:
        tried = "was tried on the placements of the best plans only" if restaged else "was not tried"
        found.append(
            f"CPU offload of {_offloads(reserve)} {tried} because plans fit without it; pin `offload` to try it "
            f"{'everywhere ' if restaged else ''}"
            f"(no plan of equal stages with it is faster than {format_seconds(floor)})"
        )
    return tuple(found)


def _offloads(hosted: Collection[Hosted]) -> str:
    names = {
        Hosted.ACTIVATIONS: "activations",
        Hosted.OPTIMIZER: "optimizer state",
        Hosted.UPDATE: "optimizer state with its update",
        Hosted.GRADIENTS: "gradients and optimizer",
        Hosted.PARAMETERS: "parameters, gradients and optimizer",
    }
    states = [own for own in names if own in hosted and own is not Hosted.ACTIVATIONS]
    named = [own for own in names if own in hosted and own is Hosted.ACTIVATIONS] + states[-1:]
    return " and ".join(names[own] for own in named)


def _data_major_words(grids: Sequence[str], num_nodes: int) -> tuple[str, ...]:
    if not grids:
        return ()
    span = f", which span {GROUP_NODES} nodes at most" if num_nodes > GROUP_NODES else ""
    return (
        f"meshes of three axes whose major one is data parallel {', '.join(grids)}; every discovered sharding of every "
        f"op on the other two{span}",
    )


def _left_out_words(space: Sequence[Configuration], data_major: Sequence[str]) -> tuple[str, ...]:
    """Return what plans by degrees can be that no configuration is."""
    if all(own.num_stages * own.mesh.size == 1 for own in space):
        return ()
    axes = ", meshes of three axes whose major one is not data parallel, and meshes of four" if data_major else ""
    return (f"left out: plans on numbers of GPUs that are not named here{axes}",)

"""A planning task: the request checked, the model imported, its rules discovered, the outer space laid out."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from autopar import solvers
from autopar.bounds.roofline import roofline
from autopar.cluster import Cluster, cluster_from_dict, load_cluster
from autopar.configuration import Configuration, configurations
from autopar.cost import (
    IDEAL,
    MIXED,
    NEAREST,
    CostModel,
    DtypePolicy,
    Stack,
    default_limit,
    load_policy,
    priced,
    resolve_stack,
    stage_limit,
)
from autopar.degrees import Degrees
from autopar.discover import Rules, discover
from autopar.errors import JobError, PinError, stopped
from autopar.events import Profile
from autopar.folding.fold import Folded
from autopar.folding.graph_facts import row_routings
from autopar.formulate.constraints import FREE, Constraints
from autopar.formulate.manual_recipes import BatchDims, batch_dims
from autopar.fusion_plan import BUCKETS, FUSIONS
from autopar.limits import MAX_BATCH, MAX_DEVICES
from autopar.machine import peak_bytes
from autopar.pins import Frame, Pins, constrain, read_pins, unequal_left
from autopar.plan import Job, PhaseTime
from autopar.problem import Problem
from autopar.progress import Progress, ProgressCallback, StopCallback, never, silent
from autopar.request import JobRequest
from autopar.search.context import SearchContext
from autopar.search.settings import DEFAULT_SETTINGS, SearchSettings
from autopar.search.share_space import ShareSpace, share_space
from autopar.search.submesh_space import UnequalSpace, unequal
from autopar.workload import Workload, default_batch, job_stack

NO_PINS = Pins()

NO_SECONDS = 1e-9
"""A time limit that is over at once; a search goes on until its first plan all the same, for half a minute at most."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard to look for a plan.

    Attributes:
        solver: Solver of the placement problems, a key of `autopar.solvers.SOLVERS`.
        top_k: Number of plans wanted.
        time_limit: Seconds until the plan is found and verified; None for no limit.
        seed: Of whatever a solver draws at random; plans are repeatable for every seed.
        settings: Constants of the search.
        fusion: What of the plans found is fused, a word of `FUSIONS`.

    Raises:
        JobError: If a number is not positive, the seed negative, or the word unknown.
        SolverError: If there is no such solver.
    """

    solver: str = "auto"
    top_k: int = 3
    time_limit: float | None = None
    seed: int = 0
    settings: SearchSettings = DEFAULT_SETTINGS
    fusion: str = BUCKETS

    def __post_init__(self) -> None:
        solvers.load(self.solver)
        if self.top_k < 1:
            raise JobError(f"top {self.top_k} plans", hint="--top-k takes a whole number from 1 on")
        if self.time_limit is not None and not self.time_limit > 0:
            raise JobError(f"a time limit of {self.time_limit:g} s", hint="--time-limit takes seconds above 0")
        if self.seed < 0:
            raise JobError(f"a seed of {self.seed}", hint="--seed takes a whole number from 0 on")
        if self.fusion not in FUSIONS:
            raise JobError(f"fusion {self.fusion!r}", hint=f"--fusion takes {', '.join(FUSIONS)}")

    def after(self, seconds: float) -> "Effort":
        """Return what is left of the effort when some seconds are over: no time at all may be left, but no less."""
        if self.time_limit is None:
            return self
        return replace(self, time_limit=max(NO_SECONDS, self.time_limit - seconds))


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A job ready to be searched, by the planner or by a baseline.

    Attributes:
        job: The request.
        workload: The model.
        rules: Sharding rules of its ops.
        costs: Cost model of the cluster.
        space: The declared space.
        phases: What preparing it took.
        cluster: What the job gets its devices from.
        pins: What was pinned or forbidden.
        constraints: What that leaves inside a configuration.
        unequal: Pipelines whose stages have meshes of their own; None if there are none.
        shares: Rows of unequal devices with different shares of the batch; None if there are none.
        runs: Tells whether the framework that the plan is for can run given degrees; None without a framework.
    """

    job: Job
    workload: Workload
    rules: Rules
    costs: CostModel
    space: list[Configuration]
    phases: tuple[PhaseTime, ...]
    cluster: Cluster
    pins: Pins = NO_PINS
    constraints: Constraints = FREE
    unequal: UnequalSpace | None = None
    shares: ShareSpace | None = None
    runs: Callable[[Degrees], bool] | None = None

    def context(
        self,
        effort: Effort,
        *,
        progress: ProgressCallback = silent,
        should_stop: StopCallback = never,
        on_problem: Callable[[Problem], None] | None = None,
    ) -> SearchContext:
        """Return the inputs of the search of the space."""
        samples = _extreme_samples(self._counts, self.job.global_batch)
        small, large = (self.workload.folded(number) for number in samples)
        return SearchContext(
            folded=self.workload.folded,
            rules=self.rules_of,
            costs=self.costs,
            solver=solvers.load(effort.solver),
            roofline=roofline(small, large, samples, self.costs),
            global_batch=self.job.global_batch,
            memory_limit=self.job.memory_limit,
            keep=effort.top_k,
            time_limit=math.inf if effort.time_limit is None else effort.time_limit,
            settings=effort.settings,
            before=sum(phase.seconds for phase in self.phases),
            progress=progress,
            should_stop=should_stop,
            on_problem=on_problem,
            seed=effort.seed,
            batch_dims=self.batch_dims if effort.solver == "grid" else None,
            constraints=self.constraints,
            host_room=self.host_room,
            unequal=self.unequal,
            shares=self.shares,
            rooflines=tuple(
                roofline(small, large, samples, self.costs.on(range(first, first + 1))) for first in self.group_starts
            ),
        )

    @property
    def _counts(self) -> set[int]:
        """The numbers of microbatches of the space."""
        others = () if self.unequal is None else self.unequal.microbatches
        return {*(configuration.num_microbatches for configuration in self.space), *others}

    @property
    def group_starts(self) -> tuple[int, ...]:
        """First device of each group of equal nodes."""
        groups = self.costs.cluster.groups
        return tuple(sum(group.devices for group in groups[:number]) for number in range(max(1, len(groups))))

    @property
    def largest_limit(self) -> float:
        """Bytes that a device of the group of nodes with the most memory may use."""
        cluster, limit = self.costs.cluster, self.job.memory_limit
        return max((stage_limit(cluster, limit, range(first, first + 1)) for first in self.group_starts), default=limit)

    @property
    def opened(self) -> "Task":
        """The task with all in its space that may lie in host memory."""
        return replace(self, constraints=self.constraints.opened)

    @property
    def last_opened(self) -> "Task | None":
        """The task with parameters in host memory; None if pins exclude that, or the host runs no update."""
        host, constraints = self.costs.cluster.host, self.constraints.last_opened
        if host is None or not host.memory_bandwidth or constraints is None:
            return None
        return replace(self, constraints=constraints)

    @property
    def by_kind(self) -> tuple[Constraints, ...]:
        """The constraints with the reserve opened, then with each kind of state that the host can update."""
        host, constraints = self.costs.cluster.host, self.constraints
        updates = host is not None and bool(host.memory_bandwidth)
        return constraints.by_kind if updates and not constraints.hosted else constraints.by_kind[:1]

    @property
    def on_device(self) -> "Task":
        """The task in whose space nothing lies in host memory but what is pinned there."""
        return replace(self, constraints=replace(self.constraints, reserve=frozenset()))

    @property
    def host_room(self) -> float:
        """Bytes of host memory per device that may be taken: its share of its host's; none if that is unknown."""
        clusters = [own.cluster for own in self.costs.cluster.groups] or [self.costs.cluster]
        hosts = [cluster.host for cluster in clusters]
        return min(own.usable / min(own.devices, self.job.gpus) if own is not None else 0.0 for own in hosts)

    def rules_of(self, folded: Folded) -> Rules:
        """Return the rules of a graph of the job's; see `rules_for`."""
        return rules_for(folded, self.rules)

    @property
    def batch_dims(self) -> BatchDims:
        """The batch dim of every value that has one.

        It is the first dim in which two microbatch sizes differ; if the model insists on one, the first of that size.
        """
        fixed = self.workload.fixed_batch
        if fixed is None:
            largest = _extreme_samples(self._counts, self.job.global_batch)[1]
            return batch_dims(self.workload.folded(largest).graph.values, self.workload.probe.values)
        return self.workload.batch_dims(fixed)


def prepare(request: JobRequest, *, progress: ProgressCallback = silent, should_stop: StopCallback = never) -> Task:
    """Return a job ready to be searched: model imported, rules discovered, space declared.

    Args:
        request: The job.
        progress: Told which phase begins, and what is discovered.
        should_stop: Polled; once true this ends in an error.

    Raises:
        AutoparError: If the model, cluster or request is wrong.
        InterruptedSearchError: If `should_stop` said so.
    """
    whole, gpus, cache_dir = request.load_cluster(), request.gpus, request.cache_dir
    machine = job_machine(gpus, whole)
    software, policy = request.load_stack(), load_policy(request.precision)
    check_request(gpus, machine, request.global_batch, request.memory_limit)
    wanted, profile = read_pins(request.pins), request.load_profile()
    clock = PhaseClock(progress)
    with clock("import"):
        workload = request.open_workload()
        with workload.stoppable(should_stop):
            batch = request.global_batch or default_batch(workload, gpus)
            workload.global_batch = batch
            space = _space(workload, machine, gpus, batch)
    with clock("discover"), workload.stoppable(should_stop):
        found = workload.rules(cache_dir=cache_dir, progress=_stopping(progress, should_stop))
    job = make_job(workload, gpus, batch, machine, software, policy, request.memory_limit)
    costs = priced(CostModel(machine, policy, software), profile)
    task = Task(job, workload, found, costs, space, clock.times, whole)
    return pinned(task, wanted)


def _stopping(progress: ProgressCallback, should_stop: StopCallback) -> ProgressCallback:
    """Return a callback that hands progress on, and raises `InterruptedSearchError` once it should stop."""

    def tell(step: Progress) -> None:
        if should_stop():
            raise stopped()
        progress(step)

    return tell


def pinned(task: Task, pins: Pins) -> Task:
    """Return a task with other pins.

    Raises:
        PinError: If a pin speaks of something that is not there, or nothing is left.
    """
    job, workload = task.job, task.workload
    fixed = workload.fixed_batch
    orders = True in pins.pin.pp_inside
    space = _space(workload, task.costs.cluster, job.gpus, job.global_batch, orders=orders)
    blocks = workload.folded(fixed or job.global_batch).num_blocks
    declared = unequal(space, task.costs.cluster, job.gpus, blocks)
    left = unequal_left(declared, pins, job.global_batch, blocks)
    open_count = pins.without(*(item for item in pins.items if (item.section, item.key) == ("pin", "stages")))
    any_count = unequal_left(declared, open_count, job.global_batch, blocks)
    counts = () if any_count is None else any_count.stages
    frame = Frame(task.costs.cluster, job.gpus, job.global_batch, fixed, blocks, left, counts)
    space, constraints = constrain(
        space,
        pins,
        frame,
        workload.folded,
        task.rules_of,
        workload.batch_dims_of,
        trains=job.mode == "train",
        host=task.costs.cluster.host is not None,
    )
    if constraints.needs_host and left is not None:  # stages with meshes of their own have nothing there
        left = None
        if not space:
            raise PinError("unequal: stages with meshes of their own offload nothing", hint="drop one of the pins")
    job = replace(job, pins=pins.to_mapping())
    shared = None if pins else share_space(task.costs.cluster, job.gpus, job.global_batch, job.mode, fixed)
    return replace(task, job=job, space=space, pins=pins, constraints=constraints, unequal=left, shares=shared)


def resized(task: Task, *, gpus: int | None = None, memory_limit: float | None = None) -> Task:
    """Return a task of the same model and batch on another number of devices, or with more or less memory.

    Raises:
        JobError: If the devices do not fill nodes.
        PinError: If the pins leave nothing there.
    """
    count = gpus or task.job.gpus
    machine = job_machine(count, task.cluster)
    check_request(count, machine, None, None)
    job = replace(task.job, gpus=count, memory_limit=memory_limit or task.job.memory_limit, cluster=machine.to_dict())
    costs = priced(replace(task.costs, cluster=machine), task.costs.profile)
    return pinned(replace(task, job=job, costs=costs), task.pins)


def make_job(
    workload: Workload,
    gpus: int,
    global_batch: int,
    machine: Cluster,
    stack: Stack,
    policy: DtypePolicy = MIXED,
    memory_limit: float | None = None,
) -> Job:
    """Return the record of a request.

    Args:
        workload: The model, with its mode, loss and optimizer.
        gpus: Number of devices.
        global_batch: Samples per step.
        machine: The part of a cluster that the job gets.
        stack: What the software makes of it.
        policy: Types of numbers.
        memory_limit: Bytes per device; None for most of the device's memory.
    """
    return Job(
        workload.mode,
        gpus,
        global_batch,
        memory_limit or default_limit(machine),
        machine.to_dict(),
        workload.loss,
        workload.optimizer,
        stored_stack(stack),
        policy.name,
        sync_batchnorm=workload.synchronises_batchnorm,
        lora="" if workload.lora is None else str(workload.lora),
    )


def stored_stack(stack: Stack) -> dict[str, object]:
    """Return what a job holds of a stack: nothing of the ideal one, as in plans that know of none."""
    return {} if stack == IDEAL else stack.to_dict()


def job_costs(job: Job, stack: Stack | None = None, profile: Profile | None = None) -> CostModel:
    """Return the cost model of a job: its cluster under the stack it was planned for, or under another one.

    Args:
        job: The job.
        stack: Another stack than its own.
        profile: Measured events that count in place of formulas.

    Raises:
        ClusterError: If what the job holds is no cluster.
        JobError: If it names no precision.
        StackError: If it holds no stack.
    """
    software = job_stack(job) if stack is None else stack
    return priced(CostModel(cluster_from_dict(job.cluster), load_policy(job.precision), software), profile)


def program_costs(
    gpus: int,
    *,
    cluster: str | Path | Cluster = "h100",
    stack: str | Path | Stack = NEAREST,
    precision: str = "mixed",
    profile: str | Path | Profile | None = None,
) -> CostModel:
    """Return the cost model of a program on some number of devices; arguments as of `solve`.

    Raises:
        AutoparError: If the cluster, the stack or the precision is wrong.
    """
    machine = job_machine(gpus, cluster if isinstance(cluster, Cluster) else load_cluster(cluster))
    check_request(gpus, machine, None, None)
    costs = CostModel(machine, load_policy(precision), resolve_stack(stack, machine))
    return priced(costs, Profile.of(profile))


NO_RULES = Rules({}, 0, 0, 0.0)


def rules_for(folded: Folded, rules: Rules = NO_RULES, *, cache_dir: str | Path | None = None) -> Rules:
    """Return the rules of a graph, discovering those of ops it has and the probe they were discovered for has not.

    A microbatch of one sample, or of as many as another dim has, may be simplified differently when it is imported.

    Args:
        folded: The graph.
        rules: What is known.
        cache_dir: Where discovered rules are kept between runs; None to keep nothing.
    """
    values = folded.graph.values
    missing = tuple(
        op
        for kind in folded.kinds
        for op in kind.ops
        if (rule := rules.by_op.get(op.name)) is None
        or rule.kind != op.kind
        or rule.output_ranks != tuple(len(values[name].shape) if name else 0 for name in op.outputs)
    )
    if not missing:
        return rules
    found = discover(replace(folded.graph, ops=missing), cache_dir=cache_dir)
    return replace(rules, by_op={**rules.by_op, **found.by_op})


def job_machine(gpus: int, cluster: Cluster) -> Cluster:
    """Return the part of a cluster that a job gets.

    Raises:
        JobError: If it asks for no GPUs, or for more than can be planned.
        ClusterError: If the groups of the cluster have fewer.
    """
    if gpus < 1:
        raise JobError(f"{gpus} GPUs", hint="--gpus takes a whole number from 1 on")
    if gpus > MAX_DEVICES:
        raise JobError(f"{gpus} GPUs are more than can be planned", hint=f"at most {MAX_DEVICES} can")
    cluster.group_of(gpus - 1)
    return cluster.of_job(gpus)


def check_request(gpus: int, machine: Cluster, global_batch: int | None, memory_limit: float | None) -> None:
    """Check the numbers of a request.

    Raises:
        JobError: If the batch is not positive or too large, devices do not fill nodes, or the limit is above the
            device's memory.
    """
    per_node = machine.devices_per_node
    if gpus > per_node and gpus % per_node:
        lower_count, upper_count = gpus // per_node * per_node, -(-gpus // per_node) * per_node
        raise JobError(
            f"{gpus} GPUs do not fill nodes of {per_node}",
            hint=f"use {lower_count} or {upper_count}, or describe the cluster in a file",
        )
    if global_batch is not None and global_batch < 1:
        raise JobError(f"a global batch of {global_batch}", hint="--global-batch takes a whole number from 1 on")
    if global_batch is not None and global_batch > MAX_BATCH:
        raise JobError(f"a global batch of {global_batch} is more than can be planned", hint=f"at most {MAX_BATCH} can")
    if memory_limit is not None and not 0 < memory_limit <= machine.device.memory:
        raise JobError(
            f"a memory limit of {memory_limit / 1e9:g} GB on a device of {machine.device.memory / 1e9:g} GB",
            hint="--memory-limit takes GB above 0, at most the device's memory",
        )


def _space(workload: Workload, machine: Cluster, gpus: int, batch: int, *, orders: bool = False) -> list[Configuration]:
    """Return the outer space of the job; `orders` as of `configurations`."""
    fixed = workload.fixed_batch
    folded = workload.folded(fixed or batch)
    return configurations(
        gpus=gpus,
        devices_per_node=machine.devices_per_node,
        num_blocks=folded.num_blocks,
        global_batch=batch,
        batch_of_model=fixed,
        mode=workload.mode,
        routes=bool(row_routings(folded)),
        orders=orders and not (machine.groups or machine.domains or machine.intra.torus),
    )


def _extreme_samples(counts: Iterable[int], batch: int) -> tuple[int, int]:
    """Return two microbatch sizes of the space, equal if it has only one; sizes between them follow by linearity.

    Args:
        counts: Numbers of microbatches.
        batch: Samples per step.
    """
    sizes = sorted({batch // count for count in counts})
    return sizes[min(1, len(sizes) - 1)], sizes[-1]


class PhaseClock:
    """Clock of the phases of a call."""

    def __init__(self, progress: ProgressCallback = silent, before: tuple[PhaseTime, ...] = ()) -> None:
        """Start a clock.

        Args:
            progress: Told when a phase begins.
            before: Phases that are over.
        """
        self._progress = progress
        self._times = list(before)

    @property
    def times(self) -> tuple[PhaseTime, ...]:
        """The phases so far."""
        return tuple(self._times)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a phase."""
        self._progress(Progress(name))
        start = time.perf_counter()
        yield
        self._times.append(PhaseTime(name, time.perf_counter() - start, peak_bytes()))

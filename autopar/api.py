"""The main path, on one screen: model -> training step -> rules -> search -> program -> simulation -> plan."""

import math
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from autopar import solvers
from autopar.cluster import Cluster, cluster_from_dict, load_cluster
from autopar.cost import CostModel
from autopar.discover import Rules, discover
from autopar.errors import InfeasibleError, InterruptedSearchError, JobError, PlanError
from autopar.formulate.recipes import BatchDims, batch_dims
from autopar.formulate.step import model_flops
from autopar.iopddl import save
from autopar.plan import Job, PhaseTime, Plan, SearchReport, Simulated, StageMemory
from autopar.problem import OPTIMALITY_TOLERANCE, Problem
from autopar.program.lower import lower
from autopar.program.verify import verify_program
from autopar.progress import Progress, ProgressCallback, StopCallback, never, silent
from autopar.search.assemble import assemble
from autopar.search.explain import explain_infeasible
from autopar.search.floor import floor
from autopar.search.planner import Outcome, Search
from autopar.search.space import Configuration, configurations, describe
from autopar.simulate import Timeline
from autopar.simulate import simulate as run_program
from autopar.workload import Workload, default_batch, open_workload

MEMORY_SHARE = 0.94  # of device memory; the rest is fragmentation, library workspaces and NCCL buffers
VERIFY = 3  # candidates simulated per plan asked for: the simulator, not the formula, ranks the plans that are returned


def solve(
    model: str | Path,
    *,
    gpus: int,
    cluster: str | Path | Cluster = "h100",
    mode: str = "train",
    global_batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    top_k: int = 3,
    time_limit: float | None = None,
    solver: str = "auto",
    memory_limit: float | None = None,
    loss: str = "auto",
    optimizer: str = "adam",
    cache_dir: Path | None = None,
    progress: ProgressCallback = silent,
    should_stop: StopCallback = never,
    dump_problem: Path | None = None,
) -> Plan:
    """Return the best plan found for a model on a cluster, with the runners-up and a bound on what is possible.

    Args:
        model: Path of an ONNX file, or `zoo:NAME`.
        gpus: Number of devices.
        cluster: Preset name, YAML file or record.
        mode: "train" or "infer".
        global_batch: Samples per step; None for the model's published batch, else 8 per GPU.
        dims: Dynamic dims by name; for zoo models fields of the configuration.
        top_k: Number of plans wanted.
        time_limit: Seconds for the search; None for no limit.
        solver: Solver of the placement problems, a key of `autopar.solvers.SOLVERS`.
        memory_limit: Bytes per device a plan may use; None for most of the device's memory.
        loss: "auto", "cross-entropy", "mse" or "mean".
        optimizer: "adam" or "sgd".
        cache_dir: Where discovered rules are kept between runs; None to keep nothing.
        progress: Told how far the search is.
        should_stop: Polled; once true the best plan so far is returned with `termination` "interrupted".
        dump_problem: File that receives the placement problem of the best plan's configuration as IOPDDL JSON.

    Raises:
        AutoparError: If the model, cluster or request is wrong (`ModelError`, `ClusterError`, `JobError`, ...).
        InfeasibleError: If no plan fits; the message says what is missing, the hint the cheapest way out.
        InterruptedSearchError: If it was stopped before the first plan.
    """
    effort = Effort(solver, top_k, time_limit)
    task = prepare(
        model,
        gpus=gpus,
        cluster=cluster,
        mode=mode,
        global_batch=global_batch,
        dims=dims,
        memory_limit=memory_limit,
        loss=loss,
        optimizer=optimizer,
        cache_dir=cache_dir,
        progress=progress,
    )
    return plan_task(task, effort, progress=progress, should_stop=should_stop, dump_problem=dump_problem)


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard to look for a plan.

    Attributes:
        solver: Solver of the placement problems, a key of `autopar.solvers.SOLVERS`.
        top_k: Number of plans wanted.
        time_limit: Seconds for the search; None for no limit.

    Raises:
        JobError: If a number is not positive.
        SolverError: If there is no such solver.
    """

    solver: str = "auto"
    top_k: int = 3
    time_limit: float | None = None

    def __post_init__(self) -> None:
        solvers.load(self.solver)
        if self.top_k < 1:
            raise JobError(f"top {self.top_k} plans", hint="--top-k takes a whole number from 1 on")
        if self.time_limit is not None and not self.time_limit > 0:
            raise JobError(f"a time limit of {self.time_limit:g} s", hint="--time-limit takes seconds above 0")


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
    """

    job: Job
    workload: Workload
    rules: Rules
    costs: CostModel
    space: list[Configuration]
    phases: tuple[PhaseTime, ...]

    def search(
        self,
        effort: Effort,
        *,
        progress: ProgressCallback = silent,
        should_stop: StopCallback = never,
        on_problem: Callable[[Problem], None] | None = None,
    ) -> Search:
        """Return the search of the space."""
        samples = _extreme_samples(self.space, self.job.global_batch)
        small, large = (self.workload.folded(number) for number in samples)
        return Search(
            folded=self.workload.folded,
            rules=self.rules,
            costs=self.costs,
            solver=solvers.load(effort.solver),
            floor=floor(small, large, samples, self.costs),
            global_batch=self.job.global_batch,
            memory_limit=self.job.memory_limit,
            keep=effort.top_k,
            time_limit=math.inf if effort.time_limit is None else effort.time_limit,
            progress=progress,
            should_stop=should_stop,
            on_problem=on_problem,
            batch_dims=self.batch_dims if effort.solver == "grid" else None,
        )

    @property
    def batch_dims(self) -> BatchDims:
        """The batch dim of every value that has one.

        It is the first dim in which two microbatch sizes differ; if the model insists on one, the first of that size.
        """
        fixed = self.workload.fixed_batch
        if fixed is None:
            largest = _extreme_samples(self.space, self.job.global_batch)[1]
            return batch_dims(self.workload.folded(largest).graph.values, self.workload.probe.values)
        values = self.workload.folded(fixed).graph.values
        return {name: value.shape.index(fixed) for name, value in values.items() if fixed in value.shape}


def prepare(
    model: str | Path,
    *,
    gpus: int,
    cluster: str | Path | Cluster = "h100",
    mode: str = "train",
    global_batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    memory_limit: float | None = None,
    loss: str = "auto",
    optimizer: str = "adam",
    cache_dir: Path | None = None,
    progress: ProgressCallback = silent,
) -> Task:
    """Return a job ready to be searched: model imported, rules discovered, space declared; arguments as of `solve`.

    Raises:
        AutoparError: If the model, cluster or request is wrong.
    """
    machine = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    _check_request(gpus, machine, global_batch, memory_limit)
    clock = PhaseClock(progress)
    with clock("import"):
        workload = open_workload(model, mode=mode, dims=dims, loss=loss, optimizer=optimizer)
        batch = global_batch or default_batch(workload, gpus)
        space = _space(workload, machine, gpus, batch)
    with clock("discover"):
        found = discover(workload.probe, cache_dir=cache_dir, progress=progress)
    limit = memory_limit or MEMORY_SHARE * machine.device.memory
    job = Job(mode, gpus, batch, limit, machine.to_dict(), loss, optimizer)
    return Task(job, workload, found, CostModel(machine), space, clock.times)


def plan_task(
    task: Task,
    effort: Effort,
    *,
    progress: ProgressCallback = silent,
    should_stop: StopCallback = never,
    dump_problem: Path | None = None,
) -> Plan:
    """Return the best plan found for a task; arguments and errors as of `solve`."""
    clock = PhaseClock(progress, task.phases)
    problems: list[Problem] = []
    with clock("search"):
        search = task.search(
            effort,
            progress=progress,
            should_stop=should_stop,
            on_problem=problems.append if dump_problem is not None else None,
        )
        outcome = search.run(task.space)
    if not outcome.candidates and not outcome.stopped:
        raise explain_infeasible(search, task.space)
    plan = conclude(outcome, task, effort.solver, effort.top_k, clock)
    if dump_problem is not None:
        best = str(outcome.candidates[0].configuration)
        save([problem for problem in problems if problem.name == best][-1], dump_problem)
    return plan


def conclude(outcome: Outcome, task: Task, method: str, top_k: int, clock: "PhaseClock") -> Plan:
    """Return the plan a search comes to: its best candidates lowered, verified, simulated and ranked.

    Args:
        outcome: What a search of the task's space found.
        task: The task.
        method: What found it, for the report.
        top_k: Number of plans wanted.
        clock: Has timed the search.

    Raises:
        InfeasibleError: If there is no candidate, or none fits when simulated.
        InterruptedSearchError: If the search was stopped before the first.
    """
    if not outcome.candidates and outcome.stopped:
        raise InterruptedSearchError(f"stopped by {outcome.stopped} before the first plan", hint="allow more time")
    with clock("simulate"):
        plans = [assemble(c, task.workload.info(), task.job) for c in outcome.candidates[: VERIFY * top_k]]
        plans = [fit for plan in plans if (fit := _verify(plan, task.workload, task.costs)) is not None]
        if not plans:
            raise InfeasibleError("every plan exceeds the memory limit when simulated", hint="raise --memory-limit")
        plans.sort(key=lambda plan: plan.simulated.step_seconds if plan.simulated else math.inf)
    report = _report(outcome, task.space, plans[0].objective, method, clock.times)
    runners_up = tuple(plan.without_alternatives() for plan in plans[1:top_k])
    return replace(plans[0], search=report, alternatives=runners_up)


def simulate_plan(plan: Plan, *, model: str | Path | None = None, trace: bool = True) -> Timeline:
    """Return the simulated timeline of a plan: time and memory of every stage, with the bars of a trace.

    Args:
        plan: A plan, solved or read from a file.
        model: Where the model is now; None for where it was.
        trace: Whether to collect the bars of the trace.

    Raises:
        PlanError: If the plan does not fit the model.
    """
    job = plan.job
    workload = open_workload(
        model or plan.model.source, mode=job.mode, dims=dict(plan.model.dims), loss=job.loss, optimizer=job.optimizer
    )
    folded = workload.folded(plan.microbatch)
    if workload.info().sha256 != plan.model.sha256:
        raise PlanError(
            f"{workload.source!r} is not the model the plan was made for (its hash differs)",
            hint="solve again, or pass the original file with --model",
        )
    costs = CostModel(cluster_from_dict(job.cluster))
    return run_program(lower(plan, folded, costs), costs, trace=trace)


def rules(
    model: str | Path,
    *,
    mode: str = "train",
    dims: Mapping[str, int] | None = None,
    cache_dir: Path | None = None,
    loss: str = "auto",
    optimizer: str = "adam",
) -> Rules:
    """Return the sharding rules discovered for the ops of a model, and of its training step in training mode."""
    workload = open_workload(model, mode=mode, dims=dims, loss=loss, optimizer=optimizer)
    return discover(workload.probe, cache_dir=cache_dir)


def _check_request(gpus: int, machine: Cluster, global_batch: int | None, memory_limit: float | None) -> None:
    if gpus < 1:
        raise JobError(f"{gpus} GPUs", hint="--gpus takes a whole number from 1 on")
    per_node = machine.devices_per_node
    if gpus > per_node and gpus % per_node:
        lower_count, upper_count = gpus // per_node * per_node, -(-gpus // per_node) * per_node
        raise JobError(
            f"{gpus} GPUs do not fill nodes of {per_node}",
            hint=f"use {lower_count} or {upper_count}, or describe the cluster in a file",
        )
    if global_batch is not None and global_batch < 1:
        raise JobError(f"a global batch of {global_batch}", hint="--global-batch takes a whole number from 1 on")
    if memory_limit is not None and not 0 < memory_limit <= machine.device.memory:
        raise JobError(
            f"a memory limit of {memory_limit / 1e9:g} GB on a device of {machine.device.memory / 1e9:g} GB",
            hint="--memory-limit takes GB above 0, at most the device's memory",
        )


def _space(workload: Workload, machine: Cluster, gpus: int, batch: int) -> list[Configuration]:
    """Return the outer space of the job."""
    fixed = workload.fixed_batch
    return configurations(
        gpus=gpus,
        devices_per_node=machine.devices_per_node,
        num_blocks=workload.folded(fixed or batch).num_blocks,
        global_batch=batch,
        batch_of_model=fixed,
        mode=workload.mode,
    )


def _extreme_samples(space: list[Configuration], batch: int) -> tuple[int, int]:
    """Return two microbatch sizes of the space, equal if it has only one; sizes between them follow by linearity."""
    sizes = sorted({batch // configuration.num_microbatches for configuration in space})
    return sizes[min(1, len(sizes) - 1)], sizes[-1]


def _verify(plan: Plan, workload: Workload, costs: CostModel) -> Plan | None:
    """Return the plan with the simulator's verdict, or None if it exceeds the memory limit after all."""
    folded = workload.folded(plan.microbatch)
    program = lower(plan, folded, costs)
    verify_program(program)
    timeline = run_program(program, costs)
    if timeline.peak_bytes > plan.job.memory_limit:
        return None
    busiest = timeline.busiest
    peak = costs.cluster.device.peak(costs.policy.numbers)
    flops = model_flops(folded) * plan.num_microbatches
    return replace(
        plan,
        simulated=Simulated(
            step_seconds=timeline.step_seconds,
            compute_seconds=busiest.busy_seconds,
            exposed_seconds=busiest.collective_seconds + busiest.gather_seconds,
            gradient_seconds=busiest.gradient_seconds,
            bubble_seconds=busiest.bubble_seconds + busiest.wait_seconds,
            mfu=flops / (timeline.step_seconds * peak * plan.job.gpus),
            stages=tuple(
                StageMemory(stage.memory.bytes, {str(c): amount for c, amount in stage.memory.breakdown if amount})
                for stage in timeline.stages
            ),
        ),
    )


def _report(
    outcome: Outcome, space: list[Configuration], objective: float, solver: str, times: tuple[PhaseTime, ...]
) -> SearchReport:
    proven = outcome.bound >= objective * (1 - OPTIMALITY_TOLERANCE)
    return SearchReport(
        solver=solver,
        termination=outcome.stopped or ("optimal" if proven else "exhausted"),
        objective=objective,
        bound=min(outcome.bound, objective),
        space=describe(space, solver=solver),
        configurations=len(space),
        solved=outcome.solved,
        pruned=outcome.pruned,
        phases=times,
    )


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
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
        self._times.append(PhaseTime(name, time.perf_counter() - start, float(peak)))

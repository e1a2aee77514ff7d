"""The main path, on one screen: model -> graph and training step -> rules -> search -> program -> simulation -> plan."""

import math
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from autopar import solvers
from autopar.cluster import Cluster, cluster_from_dict, load_cluster
from autopar.cost import CostModel
from autopar.discover import Rules, discover
from autopar.errors import InfeasibleError, InterruptedSearchError, JobError, PlanError
from autopar.formulate.step import model_flops
from autopar.plan import Job, PhaseTime, Plan, SearchReport, Simulated, StageMemory
from autopar.problem import OPTIMALITY_TOLERANCE, Problem
from autopar.iopddl import save
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
    placement_solver = solvers.load(solver)
    machine = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    _check_request(gpus, machine, global_batch, top_k, time_limit, memory_limit)
    costs = CostModel(machine)
    phases = _Phases(progress)

    with phases("import"):
        workload = open_workload(model, mode=mode, dims=dims, loss=loss, optimizer=optimizer)
        batch = global_batch or default_batch(workload, gpus)
        space = _space(workload, machine, gpus, batch)
    with phases("discover"):
        samples = _extreme_samples(space, batch)
        found = discover(workload.probe, cache_dir=cache_dir, progress=progress)
    limit = memory_limit or MEMORY_SHARE * machine.device.memory
    job = Job(mode, gpus, batch, limit, machine.to_dict(), loss, optimizer)
    problems: list[Problem] = []
    with phases("search"):
        search = Search(
            folded=workload.folded,
            rules=found,
            costs=costs,
            solver=placement_solver,
            floor=floor(workload.folded(samples[0]), workload.folded(samples[1]), samples, costs),
            global_batch=batch,
            memory_limit=limit,
            keep=top_k,
            time_limit=math.inf if time_limit is None else time_limit,
            progress=progress,
            should_stop=should_stop,
            on_problem=problems.append if dump_problem is not None else None,
        )
        outcome = search.run(space)
    if not outcome.candidates:
        if outcome.stopped:
            raise InterruptedSearchError(f"stopped by {outcome.stopped} before the first plan", hint="allow more time")
        raise explain_infeasible(search, space)
    with phases("simulate"):
        plans = [assemble(c, workload.info(), job) for c in outcome.candidates[: VERIFY * top_k]]
        plans = [verified for plan in plans if (verified := _verify(plan, workload, costs)) is not None]
        if not plans:
            raise InfeasibleError("every plan exceeds the memory limit when simulated", hint="raise --memory-limit")
        plans.sort(key=lambda plan: plan.simulated.step_seconds if plan.simulated else math.inf)
    if dump_problem is not None:
        best = str(outcome.candidates[0].configuration)
        save([problem for problem in problems if problem.name == best][-1], dump_problem)
    report = _report(outcome, space, plans[0].objective, solver, phases.times)
    runners_up = tuple(plan.without_alternatives() for plan in plans[1:top_k])
    return replace(plans[0], search=report, alternatives=runners_up)


def simulate(
    plan: Plan, *, model: str | Path | None = None, cache_dir: Path | None = None, trace: bool = True
) -> Timeline:
    """Return the simulated timeline of a plan: time and memory of every stage, with the bars of a trace.

    Args:
        plan: A plan, solved or read from a file.
        model: Where the model is now; None for where it was.
        cache_dir: Unused rules cache, accepted so that all calls take the same arguments.
        trace: Whether to collect the bars of the trace.

    Raises:
        PlanError: If the plan does not fit the model.
    """
    del cache_dir
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


def _check_request(
    gpus: int, machine: Cluster, global_batch: int | None, top_k: int, time_limit: float | None, memory_limit: float | None
) -> None:
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
    if top_k < 1:
        raise JobError(f"top {top_k} plans", hint="--top-k takes a whole number from 1 on")
    if time_limit is not None and not time_limit > 0:
        raise JobError(f"a time limit of {time_limit:g} s", hint="--time-limit takes seconds above 0")
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


class _Phases:
    """Clock of the phases of a call."""

    def __init__(self, progress: ProgressCallback) -> None:
        self._progress = progress
        self._times: list[PhaseTime] = []

    @property
    def times(self) -> tuple[PhaseTime, ...]:
        return tuple(self._times)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._progress(Progress(name))
        start = time.perf_counter()
        yield
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
        self._times.append(PhaseTime(name, time.perf_counter() - start, float(peak)))

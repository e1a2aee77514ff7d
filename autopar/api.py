"""The main path, on one screen: model -> training step -> rules -> search -> program -> simulation -> plan."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from autopar.cluster import Cluster, cluster_from_dict
from autopar.collector import seldom_collected
from autopar.cost import NEAREST, CostModel, Stack, resolve_stack
from autopar.cost.learned_kernels import LearnedKernels
from autopar.degrees import Degrees
from autopar.discover import Rules
from autopar.errors import InfeasibleError, JobError, PinError, PlanError
from autopar.events import Profile
from autopar.folding.fold import Folded
from autopar.fusion import Comparison, Joint, OpSearch, compare, fuse_jointly
from autopar.fusion_plan import BUCKETS, JOINT, FusionPlan
from autopar.iopddl import save
from autopar.pins import Pins, read_pins
from autopar.plan import DimSize, Plan
from autopar.practice import Practice, beside
from autopar.problem import Problem
from autopar.program.buckets import with_buckets
from autopar.program.listing import Listing, Origin, format_listing, open_listing, part_counts, read_listing
from autopar.program.lower import lower
from autopar.program.records import Program
from autopar.program.verify import verify_program
from autopar.progress import TROUBLE, Progress, ProgressCallback, StopCallback, never, silent
from autopar.recompute import Recompute
from autopar.recompute_apart import plan_apart
from autopar.request import JobRequest
from autopar.result_cache import ResultCache
from autopar.search.backends import HERE, Engine
from autopar.search.settings import DEFAULT_SETTINGS, SearchSettings
from autopar.seeding import NO_SEEDS, descends, seeds_of
from autopar.simulate import EVEN, Devices, Stragglers, Timeline, simulate, simulate_flat
from autopar.sizing.explain import explain_infeasible
from autopar.sizing.fewer import best_on_fewer, reserved
from autopar.task import Effort, PhaseClock, Task, job_costs, prepare, program_costs, rules_for
from autopar.task_search import search_plans
from autopar.training import Lora
from autopar.verdict import conclude, search_report, searching, simulated
from autopar.warming import Warming
from autopar.workload import job_stack, open_plan, open_workload


def solve(
    model: str | Path,
    *,
    gpus: int,
    cluster: str | Path | Cluster = "h100",
    mode: str = "train",
    global_batch: int | None = None,
    dims: Mapping[str, DimSize] | None = None,
    top_k: int = 3,
    time_limit: float | None = None,
    solver: str = "auto",
    memory_limit: float | None = None,
    loss: str = "auto",
    optimizer: str = "adam",
    sync_batchnorm: bool = False,
    lora: str | Path | Lora | None = None,
    stack: str | Path | Stack = NEAREST,
    precision: str = "mixed",
    recompute_modules: tuple[str, ...] = (),
    shared_expert_overlap: bool | None = None,
    cache_dir: str | Path | None = None,
    progress: ProgressCallback = silent,
    should_stop: StopCallback = never,
    dump_problem: Path | None = None,
    seed: int = 0,
    workers: int | None = None,
    engine: str = "local",
    ray_address: str | None = None,
    pins: str | Path | Pins | Mapping[str, object] | None = None,
    profile: str | Path | Profile | None = None,
    rival: Callable[[Task, Plan], Practice] | None = None,
    preview: Callable[[Task, StopCallback], None] | None = None,
    began: float | None = None,
    settings: SearchSettings = DEFAULT_SETTINGS,
    fusion: str = BUCKETS,
    framework: str | None = None,
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
        time_limit: Seconds until the plan is found and verified, import and discovery included; None for no limit. The
            wait for kernels that are compiled, once on a machine, does not count. A search without any plan goes on for
            up to 30 s. Why nothing fits takes up to a quarter of the limit more.
            `rival` comes on top.
        solver: Solver of the placement problems, a key of `autopar.solvers.SOLVERS`.
        memory_limit: Bytes per device a plan may use; None for most of the device's memory.
        loss: "auto", "cross-entropy", "chunked-cross-entropy", "mse" or "mean".
        optimizer: A name in `autopar.training.OPTIMIZERS`: "adam", "adamw", "adamw-8bit", "sgd",
            "lion", "muon" or "adafactor".
        sync_batchnorm: Whether devices that share a batch normalise it with statistics of all of it in training; else
            each with those of its own samples, as frameworks do by default.
        lora: Adapters to be trained in place of the model: "rank=16,targets=q:v", the path of peft's
            `adapter_config.json`, or a record; None for the one in the folder of a Hugging Face model, "none" for none.
        stack: What the software makes of the hardware: name, YAML file or record.
        precision: What is stored in which precision, a key of `autopar.cost.POLICIES`.
        recompute_modules: Modules that selective recompute runs again, names of
            `autopar.recompute.RECOMPUTE_MODULES`; none for what frees the most bytes for its seconds.
        shared_expert_overlap: Whether tokens travel to experts and back beside the shared experts of their layer; None
            for what the stack says.
        cache_dir: Where discovered rules and plans are kept between runs; None to keep nothing. A plan found before for
            the same content (model, cluster, job, effort, this autopar) is returned at once, with `search.cached`.
        progress: Told how far the search is.
        should_stop: Polled; once true the best plan so far is returned with `termination` "interrupted".
        dump_problem: File that receives the placement problem of the best plan's configuration as IOPDDL JSON; the
            search is then made even if its answer is known.
        seed: Of whatever a solver draws at random. Without a `time_limit` the same seed gives the same plan,
            unless the search is interrupted; with one it depends on the clock what is looked for and found.
        workers: Processes that search; None for this one alone, with Ray for as many as the cluster has CPUs. How many
            there are changes the plan no more than another run with the same seed does.
        engine: "local", or "ray" for processes of a Ray cluster.
        ray_address: Of a running cluster; None for one that is started on this machine.
        pins: What the plan has to keep to: a YAML file, what one holds (`{"stages": 2, "tp": [2, 4]}`), or a record.
        profile: Measured events that count in place of formulas: folder that `autopar profile` wrote, or a record;
            None for formulas alone.
        rival: Other ways to search, `autopar.bench.usual_practice` or one like it, whose best stand beside the plan as
            `Plan.rival` and `Plan.by_rules`; a plan of theirs that is faster is returned. They are not asked where
            there are pins, which they would not keep to, but those of a `framework`.
        preview: What is done with the task while other processes compile kernels, until it is told to stop:
            `autopar.bench.usual_preview` or one like it. It is not asked where there are pins.
        began: From when on `time_limit` counts, on the monotonic clock; None for now. The command line counts from the
            start of its process, whose imports take seconds.
        settings: Constants of the search: where it spends its time. Any values leave the bound valid.
        fusion: "buckets" cuts the gradients of the best plans into buckets where that saves time, "off" leaves them to
            the uniform rule, "joint" fuses ops, too. The bound holds for the objective, which knows the rules of the
            stack only.
        framework: What the plan is for, one of `autopar.frameworks.restriction.RESTRICTED`: only what it runs is
            searched; None for all plans.

    Raises:
        PinError: If a pin speaks of something that is not there, or nothing is left.
        AutoparError: If the model, cluster or request is wrong (`ModelError`, `ClusterError`, `JobError`, ...).
        InfeasibleError: If no plan fits; the message says what is missing, the hint the cheapest way out.
        InterruptedSearchError: If it was stopped before the first plan.
        WorkerError: If there is no Ray, or workers keep dying.
    """
    asked = time.monotonic() if began is None else began
    effort, crew = Effort(solver, top_k, time_limit, seed, settings, fusion), Engine(engine, workers, ray_address)
    if dump_problem is not None and not crew.is_here:
        raise JobError("only a search in this process can write its problem down", hint="leave --workers out")
    crew.start_workers()
    end = math.inf if time_limit is None else asked + time_limit + settings.overtime_seconds
    kinds: tuple[Pins, ...] = ()
    runs: Callable[[Degrees], bool] | None = None
    if framework is not None:
        from autopar.frameworks import restriction  # frameworks take long to import, and most jobs ask for none

        wanted = read_pins(pins)
        runs = None if wanted else restriction.runner(framework, model)
        pins = restriction.kept_to(framework, wanted, model=model, gpus=gpus, cluster=cluster, dims=dims, mode=mode)
        stack = restriction.stack_kept_to(framework, stack, cluster, recompute_modules, model)
        kinds = restriction.kinds_of_recompute(framework, pins) if dump_problem is None else ()
    request = JobRequest(
        model,
        gpus=gpus,
        cluster=cluster,
        mode=mode,
        global_batch=global_batch,
        dims=dims,
        memory_limit=memory_limit,
        loss=loss,
        optimizer=optimizer,
        sync_batchnorm=sync_batchnorm,
        lora=lora,
        stack=stack,
        precision=precision,
        recompute_modules=recompute_modules,
        shared_expert_overlap=shared_expert_overlap,
        pins=pins,
        profile=profile,
        cache_dir=cache_dir,
    )
    with Warming(crew.processes) as warming:
        # a signal ends it at once: there is nothing to keep yet
        try:
            task = prepare(request, progress=progress, should_stop=lambda: time.monotonic() > end)
        except PinError:
            if framework is None or runs is None:
                raise
            raise restriction.none_left(framework, gpus, global_batch) from None  # the user has no pins
        task = replace(task, runs=runs)
        cache = ResultCache(cache_dir, task, effort)
        plan = cache.answer() if dump_problem is None else None
        if plan is None:
            meanwhile = None if preview is None or task.pins else partial(preview, task)
            asked += warming.finish(progress, should_stop, meanwhile)
    if plan is None:
        left = effort.after(time.monotonic() - asked)
        if kinds:
            plan = plan_apart(task, kinds, left, progress=progress, should_stop=should_stop, engine=crew)
        else:
            plan = plan_task(
                task, left, progress=progress, should_stop=should_stop, dump_problem=dump_problem, engine=crew
            )
        _keep(plan, cache, progress)
    if rival is None or (task.pins and task.runs is None) or should_stop():
        return plan
    practice = rival(task, plan)
    best = beside(plan, practice, task, effort.fusion)
    if best != plan and practice.grid.stopped != "interrupted":
        _keep(best, cache, progress)
    return best


def _keep(plan: Plan, cache: ResultCache, progress: ProgressCallback) -> None:
    trouble = cache.keep(plan)
    if trouble:
        progress(Progress(TROUBLE, detail=trouble))


@seldom_collected()
def plan_task(
    task: Task,
    effort: Effort,
    *,
    progress: ProgressCallback = silent,
    should_stop: StopCallback = never,
    dump_problem: Path | None = None,
    engine: Engine = HERE,
) -> Plan:
    """Return the best plan found for a task; arguments and errors as of `solve`, but that the limit counts from now."""
    last = math.inf if effort.time_limit is None else time.monotonic() + effort.time_limit
    whole, kept = effort, reserved(task, effort)
    effort, end = effort.after(kept), last - kept
    clock, began, seeds = PhaseClock(progress, task.phases), time.monotonic(), NO_SEEDS
    runs = task.runs if task.runs is not None or not descends(task, effort) else lambda _: True
    if runs is not None and dump_problem is None:
        flavours = map(str, task.constraints.flavours() if task.job.mode == "train" else (Recompute.NONE,))
        with clock("degrees"):
            seeds = seeds_of(task, runs, [*flavours], effort, progress=progress, should_stop=should_stop)
        effort = effort.after(time.monotonic() - began)
    known = NO_SEEDS if task.runs is None else seeds  # without a framework the search has runners-up of its own
    problems: dict[str, Problem] = {}
    with clock("search"):
        outcome = search_plans(
            task,
            searching(effort, task),
            progress=progress,
            should_stop=should_stop,
            on_problem=(lambda problem: problems.update({problem.name: problem})) if dump_problem is not None else None,
            engine=engine,
            incumbent=known.objective,
            starts=known.starts([name for name, _ in known.found]),
        )
    explain = partial(explain_infeasible, task, effort, outcome, end=last, progress=progress, should_stop=should_stop)
    if not outcome.candidates and not outcome.stopped and seeds.plan is None:
        raise explain()
    plan: Plan | None = None
    if outcome.candidates or seeds.plan is None:
        try:
            plan = conclude(outcome, task, effort.solver, effort.top_k, clock, end, should_stop, effort.fusion)
        except InfeasibleError:  # it fits by the formula, and not when simulated
            if seeds.plan is None:
                raise explain() from None
    if plan is None:
        report = search_report(outcome, task, seeds.objective, effort.solver, clock.times)
        plan = seeds.alone(report, task, effort.fusion)
    else:
        plan = seeds.beside(plan, task, effort.fusion)
    if dump_problem is not None:
        save(problems[str(outcome.candidates[0].configuration)], dump_problem)
    return best_on_fewer(task, plan, whole, last, progress=progress, should_stop=should_stop, engine=engine)


def simulate_plan(
    plan: Plan,
    *,
    model: str | Path | None = None,
    stack: str | Path | Stack | None = None,
    trace: bool = True,
    bucket: float | None = None,
    stragglers: Stragglers = EVEN,
    profile: str | Path | Profile | None = None,
    cache_dir: str | Path | None = None,
) -> Timeline:
    """Return the simulated timeline of a plan: time and memory of every stage, with the bars of a trace.

    Args:
        plan: A plan, solved or read from a file.
        model: Where the model is now; None for where it was.
        stack: Name, YAML file or record of a software stack; None for the one it was planned for.
        trace: Whether to collect the bars of the trace, the critical path, and all of it as arrays.
        bucket: Bytes of gradients that travel together, 0 if every gradient travels alone; None for the buckets of the
            plan, else 25 MB, or 2 MB per device of a group where that is more.
        stragglers: How much slower than others devices are.
        profile: Measured events that count in place of formulas: folder that `autopar profile` wrote, or a record;
            None for formulas alone.
        cache_dir: Where discovered rules are kept between runs; None to keep nothing.

    Raises:
        PlanError: If the plan does not fit the model.
        StackError: If there is no such stack.
        ProgramError: If the plan does not compute the model: an op is placed as no discovered rule allows, a collective
            is missing.
    """
    program, costs, _ = lower_plan(plan, model=model, stack=stack, profile=profile, cache_dir=cache_dir)
    return simulate(program, costs, trace=trace, bucket=bucket, stragglers=stragglers, verified=True)


def simulate_again(
    plan: Plan,
    *,
    model: str | Path | None = None,
    stack: str | Path | Stack | None = None,
    trace: bool = False,
    bucket: float | None = None,
    stragglers: Stragglers = EVEN,
    profile: str | Path | Profile | None = None,
    cache_dir: str | Path | None = None,
) -> tuple[Plan, Timeline]:
    """Return a plan with what the simulator finds for it now, and the timeline; arguments as of `simulate_plan`."""
    program, costs, folded = lower_plan(plan, model=model, stack=stack, profile=profile, cache_dir=cache_dir)
    timeline = simulate(program, costs, trace=trace, bucket=bucket, stragglers=stragglers, verified=True)
    return simulated(plan, timeline, folded, costs), timeline


def fuse_plan(
    plan: Plan,
    *,
    fusion: str = BUCKETS,
    search: OpSearch | None = None,
    model: str | Path | None = None,
    stack: str | Path | Stack | None = None,
    kernels: str | Path | None = None,
    cache_dir: str | Path | None = None,
) -> tuple[Plan, Comparison, Joint | None]:
    """Return a plan fused anew and simulated, its gradients in buckets compared, and what fused ops bring if asked.

    What saves less than a thousandth of a step is left as the stack does it.

    Args:
        plan: A plan of a training job, solved or read from a file.
        fusion: "buckets" for gradients, "joint" for ops, too.
        search: How hard to look for kernels of several ops; None for the usual.
        model: As of `simulate_plan`.
        stack: As of `simulate_plan`.
        kernels: Learned seconds of fused ops: a name or file as of `LearnedKernels.load`; None for the formulas.
        cache_dir: As of `simulate_plan`.

    Raises:
        JobError: If the plan is for inference, or `fusion` is another word.
        PlanError: If rows of the plan have different shares of the batch.
        AutoparError: As of `simulate_plan`.
    """
    if fusion not in (BUCKETS, JOINT):
        raise JobError(f"fusion {fusion!r}", hint=f"choose {BUCKETS} or {JOINT}")
    if plan.shares:
        raise PlanError(
            "rows of the plan have different shares of the batch, whose gradients travel by the uniform rule",
            hint="give a plan with equal shares",
        )
    bare = replace(plan, fusion=None)
    program, costs, folded = lower_plan(bare, model=model, stack=stack, cache_dir=cache_dir)
    if kernels is not None:
        costs = replace(costs, kernels=LearnedKernels.load(kernels))
    if not program.trains:
        raise JobError("the plan is for inference: there are no gradients", hint="give a plan of a training job")
    joint = fuse_jointly(bare, program, folded, costs, search or OpSearch()) if fusion == JOINT else None
    if joint is None:
        found = compare(program, costs)
        chosen = FusionPlan.of_cuts(found.found.cuts) if found.found.is_worth_it else None
        program = with_buckets(program, chosen)
    else:
        chosen, program = joint.fusion, joint.program
        found = compare(program, costs)
    timeline = simulate(program, costs, verified=True)
    return simulated(replace(plan, fusion=chosen), timeline, folded, costs), found, joint


def simulate_devices(
    plan: Plan,
    *,
    model: str | Path | None = None,
    stack: str | Path | Stack | None = None,
    bucket: float | None = None,
    stragglers: Stragglers = EVEN,
    profile: str | Path | Profile | None = None,
    cache_dir: str | Path | None = None,
) -> Devices:
    """Return the times of every device in one step of a plan, each simulated apart; arguments as of `simulate_plan`."""
    program, costs, _ = lower_plan(plan, model=model, stack=stack, profile=profile, cache_dir=cache_dir)
    return simulate_flat(program, costs, bucket=bucket, stragglers=stragglers)


def simulate_program(
    program: str | Path | Listing,
    *,
    cluster: str | Path | Cluster = "h100",
    stack: str | Path | Stack = NEAREST,
    precision: str = "mixed",
    profile: str | Path | Profile | None = None,
    trace: bool = True,
    bucket: float | None = None,
    stragglers: Stragglers = EVEN,
) -> Timeline:
    """Return the simulated timeline of a distributed program that is written by hand.

    Args:
        program: Path of its text, which `Plan.program` shows an example of, or a record.
        cluster: What it runs on: preset name, YAML file or record.
        stack: What the software makes of the hardware: name, YAML file or record.
        precision: Class of numbers that matrix products run in, by the name of a policy in `autopar.cost.POLICIES`;
            the bytes of values are those the program states.
        profile: Measured events that count in place of formulas: folder that `autopar profile` wrote, or a record;
            None for formulas alone.
        trace: Whether to collect the bars of the trace, the critical path, and all of it as arrays.
        bucket: Bytes of gradients that travel together, 0 if every gradient travels alone; None for the buckets of the
            plan, else 25 MB, or 2 MB per device of a group where that is more.
        stragglers: How much slower than others devices are.

    Raises:
        ProgramError: If the text is malformed, or the program breaks a law or does not compute its graph.
        GraphError: If its graph is malformed or breaks a law.
        AutoparError: If the cluster, the stack or the precision is wrong.
    """
    found, costs, _ = open_program(program, cluster=cluster, stack=stack, precision=precision, profile=profile)
    return simulate(found, costs, trace=trace, bucket=bucket, stragglers=stragglers, verified=True)


def open_program(
    program: str | Path | Listing,
    *,
    cluster: str | Path | Cluster = "h100",
    stack: str | Path | Stack = NEAREST,
    precision: str = "mixed",
    profile: str | Path | Profile | None = None,
) -> tuple[Program, CostModel, Folded]:
    """Return a verified program, what it costs, and its graph; arguments and errors as of `simulate_program`."""
    listing = program if isinstance(program, Listing) else read_listing(program)
    folded = open_listing(listing)
    costs = program_costs(
        listing.program.num_devices, cluster=cluster, stack=stack, precision=precision, profile=profile
    )
    return listing.program, costs, folded


def list_program(plan: Plan, *, model: str | Path | None = None, cache_dir: str | Path | None = None) -> Listing:
    """Return the program of a plan with the graph it computes; arguments and errors as of `simulate_plan`."""
    program, _, folded = lower_plan(plan, model=model, cache_dir=cache_dir)
    counts, part = part_counts(program, folded.graph), None
    if len(counts) == 1:  # otherwise nothing on one device computes the same
        part = open_plan(plan, model, cache_dir=cache_dir).folded(plan.microbatch // max(counts)).graph
    return Listing(program, folded.graph, part, Origin(str(model or plan.model.source), plan.model.dims))


def program_text(plan: Plan, *, model: str | Path | None = None, cache_dir: str | Path | None = None) -> str:
    """Return the program of a plan as text, headed by what it was planned for; arguments as of `list_program`."""
    job = plan.job
    comments = (
        plan.summary,
        f"planned for cluster {cluster_from_dict(job.cluster).name}, stack {job_stack(job).name}, precision "
        f"{job.precision}: give them to `autopar simulate`",
    )
    return format_listing(list_program(plan, model=model, cache_dir=cache_dir), comments)


def lower_plan(
    plan: Plan,
    *,
    model: str | Path | None = None,
    stack: str | Path | Stack | None = None,
    profile: str | Path | Profile | None = None,
    cache_dir: str | Path | None = None,
) -> tuple[Program, CostModel, Folded]:
    """Return the verified program of a plan, what it costs, and the graph of one of its microbatches, folded.

    Arguments and errors are those of `simulate_plan`.
    """
    workload = open_plan(plan, model, cache_dir=cache_dir)
    folded = workload.folded(plan.microbatch)
    software = None if stack is None else resolve_stack(stack, cluster_from_dict(plan.job.cluster))
    costs = job_costs(plan.job, software, Profile.of(profile))
    program = lower(plan, folded, costs)
    verify_program(program, folded, rules_for(folded, workload.rules(cache_dir=cache_dir)))
    return program, costs, folded


def rules(
    model: str | Path,
    *,
    mode: str = "train",
    dims: Mapping[str, DimSize] | None = None,
    cache_dir: str | Path | None = None,
    loss: str = "auto",
    optimizer: str = "adam",
    sync_batchnorm: bool = False,
    lora: str | Path | Lora | None = None,
) -> Rules:
    """Return the sharding rules discovered for the ops of a model, and of its training step in training mode."""
    workload = open_workload(
        model,
        mode=mode,
        dims=dims,
        loss=loss,
        optimizer=optimizer,
        sync_batchnorm=sync_batchnorm,
        lora=lora,
        cache_dir=cache_dir,
    )
    return workload.rules(cache_dir=cache_dir)

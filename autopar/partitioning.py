"""Plans by tactics: a schedule of tactics applied to a model, lowered, verified and simulated as any other plan."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from autopar.cluster import Cluster, load_cluster
from autopar.cost import NEAREST, CostModel, Stack, resolve_stack
from autopar.describe.one_line import summarise
from autopar.errors import JobError, PlanError
from autopar.limits import MAX_DEVICES
from autopar.pins import Pins, pins_of
from autopar.plan import DimSize, Plan
from autopar.program.lower import lower
from autopar.program.verify import verify_program
from autopar.sharding import Mesh
from autopar.simulate import Timeline, simulate
from autopar.tactics.draft import Draft, Step, num_groups
from autopar.tactics.reading import tactics_of
from autopar.tactics.records import Pipeline, Tactic
from autopar.task import check_request, make_job, rules_for
from autopar.training import Lora
from autopar.units import parse_whole
from autopar.verdict import simulated
from autopar.workload import Workload, default_batch, open_plan, open_workload


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """What a schedule of tactics comes to.

    Attributes:
        plan: The plan, with the simulator's verdict.
        steps: What each tactic did.
        timeline: One simulated step.
        trips: How often a loop runs the model.
    """

    plan: Plan
    steps: tuple[Step, ...]
    timeline: Timeline
    trips: int = 1


def partition(
    model: str | Path,
    mesh: str | Mapping[str, int] | Mesh,
    schedule: Sequence[Tactic],
    *,
    cluster: str | Path | Cluster = "h100",
    stack: str | Path | Stack = NEAREST,
    mode: str = "train",
    global_batch: int | None = None,
    dims: Mapping[str, DimSize] | None = None,
    memory_limit: float | None = None,
    trips: int = 1,
    loss: str = "auto",
    optimizer: str = "adam",
    sync_batchnorm: bool = False,
    lora: str | Path | Lora | None = None,
    cache_dir: str | Path | None = None,
) -> Plan:
    """Return the plan that a schedule of tactics makes.

    Args:
        model: Path of an ONNX file, or `zoo:NAME`.
        mesh: The devices of one stage: sizes by axis name, the axis whose devices are neighbours last ("b=16,m=2").
        schedule: What to do, in order. What a tactic decides no later one takes back.
        cluster: Preset name, YAML file or record.
        stack: What the software makes of the hardware: name, YAML file or record.
        mode: "train" or "infer".
        global_batch: Samples per step; None for the model's published batch, else 8 per device.
        dims: Dynamic dims by name; for zoo models fields of the configuration.
        memory_limit: Bytes per device; None for most of the device's memory. A plan above it is returned all the same.
        trips: How often a loop runs the model, a step of decoding: the report counts them all, the plan is of one.
        loss: Loss of the training step.
        optimizer: Optimizer of the training step.
        sync_batchnorm: Whether devices that share a batch normalise it with statistics of all of it in training; else
            each with those of its own samples, as frameworks do by default.
        lora: Adapters to be trained in place of the model: "rank=16,targets=q:v", the path of peft's
            `adapter_config.json`, or a record; None for the one in the folder of a Hugging Face model, "none" for none.
        cache_dir: Where discovered rules are kept between runs; None to keep nothing.

    Raises:
        TacticError: If a tactic cannot be applied.
        AutoparError: If the model, the cluster, the mesh or the request is wrong.
    """
    return partition_steps(
        model, mesh, schedule, cluster=cluster, stack=stack, mode=mode, global_batch=global_batch, dims=dims,
        memory_limit=memory_limit, trips=trips, loss=loss, optimizer=optimizer, sync_batchnorm=sync_batchnorm,
        lora=lora, cache_dir=cache_dir,
    ).plan  # fmt: skip


def partition_steps(
    model: str | Path,
    mesh: str | Mapping[str, int] | Mesh,
    schedule: Sequence[Tactic],
    *,
    cluster: str | Path | Cluster = "h100",
    stack: str | Path | Stack = NEAREST,
    mode: str = "train",
    global_batch: int | None = None,
    dims: Mapping[str, DimSize] | None = None,
    memory_limit: float | None = None,
    trips: int = 1,
    loss: str = "auto",
    optimizer: str = "adam",
    sync_batchnorm: bool = False,
    lora: str | Path | Lora | None = None,
    cache_dir: str | Path | None = None,
    on_step: Callable[[Step], None] | None = None,
) -> Partition:
    """Return the plan of a schedule with what each tactic did; arguments and errors as of `partition`.

    `on_step` is told after every tactic.
    """
    devices = as_mesh(mesh)
    machine = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    software = resolve_stack(stack, machine)
    groups = _groups(schedule)
    gpus = devices.size * groups
    check_request(gpus, machine, global_batch, memory_limit)
    workload = open_workload(
        model, mode=mode, dims=dims, loss=loss, optimizer=optimizer, sync_batchnorm=sync_batchnorm,
        fusion=software.fusion, lora=lora, cache_dir=cache_dir,
    )  # fmt: skip
    batch = global_batch or default_batch(workload, gpus)
    count = _microbatches(schedule, workload, batch)
    folded = workload.folded(batch // count, count)
    rules = rules_for(folded, workload.rules(cache_dir=cache_dir))
    job = make_job(workload, gpus, batch, machine, software, memory_limit=memory_limit)
    costs = CostModel(machine, stack=software)
    draft = Draft(
        folded, rules, devices, costs,
        model=workload.info(), job=job, batch=workload.batch_dims(batch // count), num_microbatches=count,
        trips=trips,
    )  # fmt: skip
    for tactic in schedule:
        step = draft.apply(tactic)
        if on_step is not None:
            on_step(step)
    plan = summarise(draft.plan(), folded)
    program = lower(plan, folded, costs)
    verify_program(program, folded, rules)
    timeline = simulate(program, costs)
    plan = replace(simulated(plan, timeline, folded, costs), objective=timeline.step_seconds)
    return Partition(plan, tuple(draft.steps), timeline, trips)


def read_tactics(
    plan: Plan, *, model: str | Path | None = None, cache_dir: str | Path | None = None
) -> tuple[Tactic, ...]:
    """Return a schedule of tactics that makes a plan again.

    Args:
        plan: A plan, solved or read from a file.
        model: Where the model is now; None for where it was.
        cache_dir: Where discovered rules are kept between runs; None to keep nothing.

    Raises:
        PlanError: If the plan does not fit the model, or no rule allows what it does.
    """
    workload = open_plan(plan, model)
    folded = workload.folded(plan.microbatch)
    rules = rules_for(folded, workload.rules(cache_dir=cache_dir))
    return tactics_of(plan, folded, rules, workload.batch_dims(plan.microbatch))


def read_pins(plan: Plan, *, model: str | Path | None = None, cache_dir: str | Path | None = None) -> Pins:
    """Return pins that leave a plan and nothing else; arguments and errors as of `read_tactics`."""
    if plan.variants:
        begins = [stage.blocks[0] for stage in plan.stages[1:]]
        raise PlanError(
            f"stages have {len(plan.variants) + 1} variants of mesh and placements; pins split all stages alike",
            hint=f"pin what else it has: stages: {len(plan.stages)}, boundaries: {begins}, "
            f"microbatches: {plan.num_microbatches}",
        )
    workload = open_plan(plan, model)
    folded = workload.folded(plan.microbatch)
    rules = rules_for(folded, workload.rules(cache_dir=cache_dir))
    return pins_of(plan, folded, rules, workload.batch_dims(plan.microbatch))


def as_mesh(mesh: str | Mapping[str, int] | Mesh) -> Mesh:
    """Return a mesh, given as one, as sizes by axis name, or as text.

    Raises:
        JobError: If it is none.

    >>> str(as_mesh("b=16,m=2"))
    'b=16×m=2'
    """
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, str):
        sizes: dict[str, int] = {}
        for part in mesh.split(","):
            name, separator, size = (text.strip() for text in part.partition("="))
            number = parse_whole(size)
            if not (separator and name.isidentifier()) or number is None or name in sizes:
                raise JobError(f"{mesh!r} is no mesh", hint="name the axes with their sizes, e.g. b=16,m=2")
            sizes[name] = number
    else:
        sizes = dict(mesh)
    if not sizes or min(sizes.values()) < 1:
        raise JobError(f"a mesh of sizes {sizes}", hint="sizes are whole numbers from 1")
    if prod(sizes.values()) > MAX_DEVICES:
        raise JobError(f"a mesh of {prod(sizes.values())} devices", hint=f"at most {MAX_DEVICES} can be planned")
    return Mesh.of(**sizes)


def _groups(schedule: Sequence[Tactic]) -> int:
    """Return the number of groups of devices: stages, stages that take turns on the same devices counted once."""
    last = next((tactic for tactic in reversed(schedule) if isinstance(tactic, Pipeline)), None)
    return 1 if last is None else num_groups(last)


def _microbatches(schedule: Sequence[Tactic], workload: Workload, batch: int) -> int:
    """Return the number of microbatches that the last Pipeline with one says; else what the model insists on."""
    stated = [tactic.microbatches for tactic in schedule if isinstance(tactic, Pipeline) and tactic.microbatches]
    fixed = workload.fixed_batch
    count = stated[-1] if stated else (batch // fixed if fixed else 1)
    if count < 1 or batch % count:
        raise JobError(f"a batch of {batch} cannot be {count} equal microbatches", hint="choose a divisor of the batch")
    if fixed is not None and batch != count * fixed:
        raise JobError(
            f"the model works on {fixed} samples at a time, {batch} in {count} microbatches are {batch // count}",
            hint=f"a batch of {count * fixed}, or {max(1, batch // fixed)} microbatches",
        )
    return count

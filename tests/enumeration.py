"""Every plan by degrees of small random jobs, compared with what the search says of them.

Look here for the jobs (`small_job`), for the plans that are enumerated (`every_degree`), for what the declared space
leaves out of these (`left_out`), and for what counts as a violation (`Comparison.violations`). A plan by degrees is
placed by tactics, lowered and simulated, and shares no code with the search, so that a bound that is too high, a space
that lacks a plan, or a plan that is not as fast as its file says shows up here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from autopar import models
from autopar.api import plan_task, simulate_plan
from autopar.bench.baselines.degree_space import DegreeSpace, what_splits
from autopar.cluster import PRESETS, Cluster, Link, NodeGroup
from autopar.configuration import divisors
from autopar.cost import default_limit
from autopar.degrees import Degrees
from autopar.errors import JobError, TacticError
from autopar.estimates import Estimator
from autopar.plan import Plan
from autopar.prediction import Predictor
from autopar.request import JobRequest
from autopar.simplicity import NEAR as SIMPLER
from autopar.sizing.fewer import parts
from autopar.tactics.by_degrees import mesh_by_degrees
from autopar.task import Effort, Task, check_request, job_machine, prepare, resized
from tests.executions import TINY

NUM_JOBS = 30

NEAR = 1.25
"""Plans by degrees are simulated up to so many times the step time of the plan that was found: the formula is at most
13 % above the simulator for the plans found here, so that slower ones cannot be faster when simulated."""

ROOM = 1.05
"""Nor can plans fit that need so many times the memory limit by the formula."""

CLOSE = 3e-6
"""Relative: placement problems are proven optimal to 1e-6 each, and a plan is compared with another one."""

FEWER = "fewer devices"
"""What `left_out` says of numbers of devices that the search does not look at."""

_AMPLE = 2.0
MODELS = (
    "gpt2", "llama3-8b", "bert-base", "vit-b16", "mixtral-8x7b", "resnet50", "deepseek-moe-16b", "qwen3-30b-a3b",
    "deepseek-v3", "mamba2-2.7b", "mamba-2.8b", "jamba-v0.1", "nemotron-h-8b", "qwen3-next-80b-a3b", "t5-11b",
    "unet-sd1", "mlp-xs",
)  # fmt: skip
"""Models of the jobs, in an order that a new model does not change: the numbers of jobs stand in reports."""


@dataclass(frozen=True, slots=True)
class SmallJob:
    """A small job.

    Attributes:
        number: What it was drawn from.
        model: Name in the zoo.
        dims: Sizes of the model.
        gpus: Number of devices.
        cluster: The hardware.
        mode: "train" or "infer".
        global_batch: Samples per step.
        memory: Memory limit between the least peak of all plans by degrees (0) and that of the fastest one (1); above 1
            for all of the device's memory.
    """

    number: int
    model: str
    dims: Mapping[str, Any]
    gpus: int
    cluster: Cluster
    mode: str
    global_batch: int
    memory: float

    def prepare(self, folder: Path, limit: float | None = None) -> Task:
        """Return the job ready to be searched; `folder` keeps rules, and the model where a size of it is a list."""
        source, dims = f"zoo:{self.model}", dict(self.dims)
        if not all(isinstance(size, int) for size in dims.values()):
            path = folder / f"{self.model}-{self.number}.onnx"
            path.write_bytes(models.build(self.model, **self.dims).SerializeToString())
            source, dims = str(path), {}
        return prepare(
            JobRequest(
                source,
                gpus=self.gpus,
                cluster=self.cluster,
                mode=self.mode,
                global_batch=self.global_batch,
                dims=dims,
                memory_limit=limit,
                cache_dir=folder,
                stack="ideal",  # plans by degrees are priced with it, too
            )
        )

    def __str__(self) -> str:
        layers = f", {self.dims['num_layers']} layers" if "num_layers" in self.dims else ""
        memory = "ample memory" if self.memory > 1 else f"memory {self.memory:.0%}"
        return (
            f"{self.model} {self.mode}{layers}, {self.gpus} × {self.cluster.name}, batch {self.global_batch}, {memory}"
        )


def small_job(number: int) -> SmallJob:
    """Return a random job; models take turns, all else is drawn."""
    rng = np.random.default_rng([47, number])
    model = MODELS[number % len(MODELS)]
    mode = "infer" if rng.random() < 0.25 else "train"
    gpus = int(rng.choice([2, 4]))
    if model == "mlp-xs" or (mode == "infer" and model != "unet-sd1"):  # there are few plans by degrees
        gpus *= int(rng.choice([1, 2, 4], p=[0.3, 0.5, 0.2]))
    dims = dict(TINY[model])
    if "num_layers" in dims:
        dims["num_layers"] = int(rng.integers(2, 4))
    memory = float(rng.choice([0.2, 0.6, _AMPLE], p=[0.2, 0.3, 0.5]))
    cluster = _cluster(rng, gpus, mixed=gpus > 2 and rng.random() < 0.25)
    return SmallJob(number, model, dims, gpus, cluster, mode, int(rng.choice([2, 4, 4])), memory)


def _cluster(rng: np.random.Generator, gpus: int, *, mixed: bool) -> Cluster:
    """Return a cluster of one or two kinds of nodes, of one device or more, on links that may be slow."""
    node = int(rng.choice([size for size in (1, 2, 4) if size <= (gpus // 2 if mixed else gpus)]))
    intra, inter = (float(rate) for rate in 10 ** rng.uniform([6.5, 5.5], [9.5, 8.5]))
    latency = float(rng.choice([1e-7, 1e-5]))
    nodes = slow_nodes(node, intra, min(intra, inter), latency)
    if not mixed:
        return nodes
    others = slow_nodes(node, intra, min(intra, inter), latency, speed=float(rng.uniform(0.3, 0.8)))
    count = gpus // node
    groups = (NodeGroup(count - count // 2, nodes), NodeGroup(count // 2, others))
    return Cluster.mixed(f"two kinds of {nodes.name}", groups, nodes.inter)


def slow_nodes(node: int, intra: float, inter: float, latency: float = 1e-7, speed: float = 1.0) -> Cluster:
    """Return nodes of devices that are a millionth as fast as an H100: tiny models are worth splitting there.

    Args:
        node: Devices per node.
        intra: Bytes/s within a node.
        inter: Bytes/s between nodes.
        latency: Seconds within a node; twice as many between nodes.
        speed: Of the devices, relative.
    """
    preset = PRESETS["h100"]
    device = replace(
        preset.device,
        name=f"slow at {speed:.2f}",
        peaks=tuple((numbers, peak / 1e6 * speed) for numbers, peak in preset.device.peaks),
        memory_bandwidth=3e8 * speed,
        launch=1e-8,
        num_sms=0,
    )
    return replace(
        preset,
        name=f"nodes of {node} at {intra:.1g} and {inter:.1g} B/s",
        device=device,
        devices_per_node=node,
        intra=Link("inside", intra, latency),
        inter=Link("between", inter, 2 * latency),
        host=None,
    )


def every_degree(task: Task) -> Iterator[Degrees]:
    """Yield every plan by degrees of a job, on all devices and on fewer, with GPipe and with groups that share."""
    workload = task.workload
    folded = workload.folded(workload.fixed_batch or 2)
    splittable = what_splits(task, folded)
    for gpus in divisors(task.job.gpus):
        try:
            check_request(gpus, job_machine(gpus, task.cluster), None, None)
        except JobError:  # such a job is refused: nodes are not filled
            continue
        space = DegreeSpace(
            gpus=gpus,
            node=task.costs.cluster.devices_per_node,
            global_batch=task.job.global_batch,
            folded=folded,
            model=splittable,
            counts=tuple(divisors(task.job.global_batch)),
            trains=workload.mode == "train",
        )
        for leaf in space.leaves():
            yield from _variants(space.degrees(leaf))


def _variants(degrees: Degrees) -> Iterator[Degrees]:
    schedules = [degrees.schedule]
    if degrees.schedule == "1f1b" and degrees.interleave == 1 and degrees.pp > 1:
        schedules.append("gpipe")
    shards = [0]
    if degrees.zero and degrees.may_share_apart:
        shards = [size for size in divisors(degrees.data) if size > 1] or [0]
    for schedule in schedules:
        for shard in shards:
            yield replace(degrees, schedule=schedule, shard=shard)


def left_out(task: Task, degrees: Degrees) -> str:
    """Return why a plan by degrees is not in the declared space of equal stages, "" if it is.

    Plans on fewer devices are those of the space on so many, where the search looks at these at all.
    What the space lists is compared as it is: the meshes, the numbers of microbatches, the schedules and the stages per
    group. Placements on a mesh are all there are, but that the major one of three axes is data parallel.
    """
    if degrees.gpus < task.job.gpus:
        machine = job_machine(degrees.gpus, task.cluster)
        looked_at = any(part.gpus == degrees.gpus and part.machine == machine for part in parts(task))
        return _left_out(resized(task, gpus=degrees.gpus), degrees) if looked_at else FEWER
    return _left_out(task, degrees)


def _left_out(task: Task, degrees: Degrees) -> str:
    """Return why a plan on all devices of a task is not in its declared space, "" if it is."""
    axes = [axis for axis in mesh_by_degrees(degrees).axes if axis.size > 1]
    if len(axes) > 3:
        return "mesh of four axes"
    if len(axes) == 3 and axes[0].name != "dp":
        return "mesh of three axes without data parallelism"
    shape = tuple(axis.size for axis in axes) or (1,)
    schedule = "interleaved" if degrees.interleave > 1 and degrees.schedule == "1f1b" else degrees.schedule
    if degrees.num_microbatches == 1:  # one microbatch passes through both alike
        schedule = {"gpipe": "1f1b", "zb-h2": "zb-h1"}.get(schedule, schedule)
    space = [own for own in task.space if own.num_stages == degrees.pp]
    if all(own.mesh.shape != shape for own in space):
        return f"mesh {'×'.join(map(str, shape))}"
    if all((own.schedule, own.num_chunks) != (schedule, degrees.interleave) for own in space):
        return f"{schedule} of {degrees.interleave} stages per group"
    listed = (shape, degrees.num_microbatches, schedule, degrees.interleave)
    found = {(own.mesh.shape, own.num_microbatches, own.schedule, own.num_chunks) for own in space}
    return "" if listed in found else f"{schedule} with {degrees.num_microbatches} microbatches"


@dataclass(frozen=True, slots=True)
class Priced:
    """A plan by degrees.

    Attributes:
        degrees: The plan.
        seconds: Of a step by the formula.
        peak_bytes: On the fullest device by the formula.
        simulated: Seconds of a step simulated; infinity if it does not fit then, or was not simulated.
    """

    degrees: Degrees
    seconds: float
    peak_bytes: float
    simulated: float = inf

    def __str__(self) -> str:
        own = self.degrees
        zero = f" zero-{own.zero}" + (f" over {own.shard}" if own.shard else "") if own.zero else ""
        turns = f" v={own.interleave}" if own.interleave > 1 else ""
        schedule = f", {own.schedule}{turns}" if own.pp > 1 else ""
        sequence = ", sequence parallel" if own.sequence_parallel else ""
        recompute = f", {own.recompute} recompute" if own.recompute != "none" else ""
        return f"{own}{zero}{sequence}{schedule}, {own.num_microbatches} × {own.samples}{recompute}"


@dataclass(eq=False)
class Enumeration:
    """The plans by degrees of a job, priced by the formula.

    Attributes:
        task: The job with all of the device's memory.
        predictor: What places and simulates plans.
        plans: Those that can be placed, fastest first.
        limit: Bytes per device that a plan of the job may use.
    """

    task: Task
    predictor: Predictor
    plans: tuple[Priced, ...]
    limit: float

    @classmethod
    def of(cls, job: SmallJob, folder: Path) -> "Enumeration":
        """Price every plan by degrees of a job."""
        task = job.prepare(folder)
        predictor = Predictor(task.workload, known=task.rules, verify=False)
        estimator = Estimator(predictor, job.cluster)
        plans = []
        for degrees in every_degree(task):
            try:
                found = estimator.estimate([degrees])
            except TacticError:  # heads that do not divide, an axis with nothing to split
                continue
            plans.append(Priced(degrees, float(found.step_seconds[0]), float(found.peak_bytes[0])))
        plans.sort(key=lambda plan: plan.seconds)
        least, fastest = min(plan.peak_bytes for plan in plans), plans[0].peak_bytes
        limit = default_limit(task.costs.cluster) if job.memory > 1 else least + job.memory * (fastest - least)
        return cls(task, predictor, tuple(plans), max(limit, least))

    @property
    def fitting(self) -> tuple[Priced, ...]:
        """The plans that fit by the formula."""
        return tuple(plan for plan in self.plans if plan.peak_bytes <= self.limit)

    def simulated(self, seconds: float) -> list[Priced]:
        """Simulate the plans that may be as fast as so many seconds, and fit."""
        found = []
        for plan in self.plans:
            if plan.seconds <= NEAR * seconds and plan.peak_bytes <= ROOM * self.limit:
                own = self.predictor.predict(plan.degrees, self.task.cluster, memory_limit=self.limit)
                found.append(replace(plan, simulated=own.timeline.step_seconds if own.fits else inf))
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """What the search found for a job beside every plan by degrees.

    Attributes:
        job: The job.
        enumeration: The plans by degrees.
        plan: What was found.
        near: The plans by degrees that may be as fast, simulated.
    """

    job: SmallJob
    enumeration: Enumeration
    plan: Plan
    near: Sequence[Priced]

    @classmethod
    def of(cls, job: SmallJob, folder: Path) -> "Comparison":
        """Enumerate the plans by degrees of a job, and search it without a time limit."""
        enumeration = Enumeration.of(job, folder)
        plan = plan_task(job.prepare(folder, enumeration.limit), Effort(top_k=1))
        assert plan.simulated is not None, "plans that are found are simulated"
        return cls(job, enumeration, plan, enumeration.simulated(plan.simulated.step_seconds))

    @property
    def best(self) -> Priced | None:
        """The fastest plan by degrees, simulated; None if none is near."""
        return min((plan for plan in self.near if plan.simulated < inf), key=lambda own: own.simulated, default=None)

    @property
    def violations(self) -> tuple[str, ...]:
        """What contradicts the search.

        That is plans of its space below its bound, or faster than its plan by more than the gap and what it gives up to
        return a simpler plan, and whatever the plan file says that is not so when it is read again.
        """
        report, simulated = self.plan.search, self.plan.simulated
        assert report is not None, "it was searched"
        assert simulated is not None, "it was simulated"
        found = []
        for plan in self.near:
            if plan.simulated == inf or left_out(self.enumeration.task, plan.degrees):
                continue
            for name, seconds in (("formula", plan.seconds), ("simulator", plan.simulated)):
                if seconds < report.bound * (1 - CLOSE):
                    found.append(f"{plan}: {seconds:.6g} s by the {name}, below the bound {report.bound:.6g} s")
            if plan.simulated < self._fastest * (1 - report.gap) * (1 - CLOSE):
                found.append(f"{plan}: {plan.simulated:.6g} s, faster than {simulated.step_seconds:.6g} s by the gap")
        return (*found, *self._of_file())

    @property
    def _fastest(self) -> float:
        """The least seconds, simulated, of the fastest plan that the search knew.

        It returns the simpler of plans that differ by `SIMPLER`, and says so, and that on fewer devices.
        """
        assert self.plan.simulated is not None, "it was simulated"
        simpler = any(remark.kind == "choice" for remark in self.plan.simulated.remarks)
        fewer = self.plan.job.gpus < self.job.gpus
        return self.plan.simulated.step_seconds / (1 + SIMPLER) ** (simpler + fewer)

    @property
    def outside(self) -> Priced | None:
        """The fastest plan by degrees that the declared space leaves out, if it is faster than what was found."""
        assert self.plan.simulated is not None, "it was simulated"
        most = self.plan.simulated.step_seconds * (1 - CLOSE)
        others = [own for own in self.near if left_out(self.enumeration.task, own.degrees) and own.simulated < most]
        return min(others, key=lambda own: own.simulated, default=None)

    def _of_file(self) -> Iterator[str]:
        """Yield where the plan's file does not say what it is."""
        plan, written = self.plan, Plan.from_json(self.plan.to_json())
        if written != plan:
            yield "the plan file reads back as another plan"
        assert plan.search is not None, "it was searched"
        assert plan.simulated is not None, "it was simulated"
        timeline = simulate_plan(written, trace=False)  # it is verified on the way
        if timeline.step_seconds != plan.simulated.step_seconds:
            yield f"simulated again it takes {timeline.step_seconds} s, not {plan.simulated.step_seconds} s"
        peaks = [stage.memory.bytes for stage in timeline.stages]
        if peaks != [stage.peak for stage in plan.simulated.stages]:
            yield f"simulated again its stages hold {peaks}"
        if not max(peaks) <= plan.job.memory_limit == self.enumeration.limit:
            yield f"it holds {max(peaks)} of {plan.job.memory_limit} bytes"
        parts = sum(part.formula for part in plan.simulated.against)
        if abs(parts - plan.objective) > 1e-9 * plan.objective:
            yield f"the parts of its objective {plan.objective} s add up to {parts} s"
        if not plan.search.bound <= plan.search.least <= plan.objective == plan.search.objective:
            yield f"bound {plan.search.bound}, least {plan.search.least}, objective {plan.objective} do not ascend"

"""A whole run as one rank sees it: prepare, step, collect, compare."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.cost import CostModel
from autopar.errors import JobError, ProgramError
from autopar.events import Profile
from autopar.ir.graph import Graph, Role
from autopar.plan import Plan
from autopar.program.files import is_program
from autopar.program.listing import Listing, Origin, open_listing, read_listing, summary
from autopar.program.lower import lower
from autopar.program.verify import verify_program
from autopar.progress import Progress, ProgressCallback
from autopar.ranks.collect import Item, collect, gradient_items, output_items, state_items
from autopar.ranks.communicator import Communicator, Group, Memory
from autopar.ranks.compare import TOLERANCES, deviation, finite, scales
from autopar.ranks.compiled_models import Engine
from autopar.ranks.lowered import Lowered, scaled_constants
from autopar.ranks.predict import predict, run_costs
from autopar.ranks.rank import Rank
from autopar.ranks.records import Deviation, RunReport, RunRequest, StageSeconds, StepComparison
from autopar.ranks.samples import cut, has_part, joined, num_parts
from autopar.ranks.step_data import Batches, Weights
from autopar.ranks.stopwatch import PHASES, Clock
from autopar.ranks.unpartitioned import OneDevice, Unpartitioned
from autopar.shares import device_ranges
from autopar.task import program_costs
from autopar.workload import Workload, open_plan, open_workload

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A request made concrete.

    Attributes:
        request: The request.
        summary: The plan or program in one line.
        lowered: The program, with the graph it computes.
        part: The graph that a microbatch, or each of its parts, runs through on one device.
        parts: Parts of a microbatch that are normalised on their own.
        workload: The model that weights are taken from; None if they are drawn.
        costs: What the predicted seconds follow from.
    """

    request: RunRequest
    summary: str
    lowered: Lowered
    part: Graph
    parts: int
    workload: Workload | None
    costs: CostModel

    @property
    def constants(self) -> Mapping[str, Array]:
        """The constants of `part`, with the loss scaled to a mean over all it runs on."""
        return scaled_constants(self.part, self.lowered.program.mean_microbatches * self.parts)

    @property
    def tolerance(self) -> float:
        """Relative error allowed."""
        if self.request.tolerance is not None:
            return self.request.tolerance
        types = {value.dtype for value in self.lowered.graph.parameters if value.is_float} or {"float32"}
        return max(TOLERANCES[dtype] for dtype in types)


def check_request(request: RunRequest) -> Plan | Listing:
    """Return the plan or the program of a request.

    Raises:
        PlanError: If there is no such plan.
        ProgramError: If there is no such program, or its text is malformed.
        GraphError: If the text of the program's graph is.
        JobError: If it needs another number of ranks.
    """
    found = read_listing(request.plan) if is_program(request.plan) else Plan.load(request.plan)
    stages = found.program.stages if isinstance(found, Listing) else found.stages
    devices = max((stage.devices[1] for stage in stages), default=0)
    if request.ranks != devices:
        what, other = (
            ("program", "") if isinstance(found, Listing) else ("plan", f", or solve for --gpus {request.ranks}")
        )
        raise JobError(
            f"the {what} is for {devices} GPUs, not for {request.ranks} ranks", hint=f"use --ranks {devices}{other}"
        )
    return found


def prepare_job(request: RunRequest) -> Job:
    """Return what a request asks for, lowered and verified.

    Raises:
        AutoparError: If plan, program, model or request are wrong (`PlanError`, `ModelError`, `JobError`, ...).
    """
    found = check_request(request)
    return _job_of_plan(request, found) if isinstance(found, Plan) else _job_of_listing(request, found)


def _job_of_plan(request: RunRequest, plan: Plan) -> Job:
    workload, costs = open_plan(plan, request.model), run_costs(plan.job, Profile.of(request.profile))
    folded = workload.folded(plan.microbatch)
    program = lower(plan, folded, costs)
    verify_program(program, folded)
    parts = num_parts(program, folded.graph)
    part = folded.graph if parts == 1 else workload.folded(plan.microbatch // parts).graph
    return Job(request, plan.summary, Lowered(program, folded), part, parts, workload, costs)


def _job_of_listing(request: RunRequest, listing: Listing) -> Job:
    folded, program = open_listing(listing), listing.program
    origin = Origin(request.model, listing.origin.dims if listing.origin else ()) if request.model else listing.origin
    workload = None if origin is None else open_workload(origin.source, dims=dict(origin.dims))
    costs = program_costs(
        program.num_devices,
        cluster=request.cluster,
        stack=request.stack,
        precision=request.precision,
        profile=request.profile,
    )
    parts = num_parts(program, folded.graph)
    if parts > 1 and listing.part is None:
        raise ProgramError(
            f"devices normalise a microbatch in {parts} parts, and the text has no graph of a part to compare with",
            hint="append the graph of the samples of one device",
        )
    return Job(
        request, summary(program), Lowered(program, folded), listing.part or folded.graph, parts, workload, costs
    )


@dataclass(slots=True, eq=False)
class _Step:
    """What rank 0 knows of a step it is going to compare.

    Attributes:
        number: From 0.
        before: States before it; None if they are the weights the run started from.
        outputs: Outputs by microbatch and name.
        gradients: Sums by gradient buffer.
        parameters: After it.
        copies: Largest difference between copies of each of these.
    """

    number: int
    before: Mapping[str, Array] | None
    outputs: dict[Any, Array]
    gradients: dict[Any, Array]
    parameters: dict[Any, Array]
    copies: dict[Any, float]


class _Session:
    """One rank's part of a run."""

    def __init__(
        self, job: Job, communicator: Communicator, memory: Memory, engine: Engine, progress: ProgressCallback
    ) -> None:
        self._job, self._communicator, self._memory, self._engine = job, communicator, memory, engine
        self._progress = progress
        lowered, seed = job.lowered, job.request.seed
        self._world: Group = tuple(range(lowered.program.num_devices))
        progress(Progress("compile", detail=f"{len(lowered.blocks)} blocks"))
        self.rank = Rank(lowered, communicator, memory, engine)
        progress(Progress("weights"))
        self.weights = Weights(job.workload, lowered.graph, seed)
        self.batches = Batches(lowered.graph, seed)
        self.rank.load(self.weights)
        self.clocks: list[dict[str, float]] = []

    def run(self) -> list[_Step]:
        """Run all steps and return those to compare (rank 0)."""
        steps, count = self._job.request.steps, self._job.lowered.program.num_microbatches
        compared: list[_Step] = []
        for number in range(steps):
            self._progress(Progress("step", number, steps))
            last = number == steps - 1
            wanted = self._job.request.compare and last and number
            before = self._collect(state_items(self._job.lowered))[0] if wanted else None
            data = [self.batches(number, index) for index in range(count)]
            self._barrier()
            clock, since = Clock(), time.perf_counter()
            self.rank.step(data, clock)
            self.clocks.append(clock.seconds | {"step": time.perf_counter() - since})
            if self._job.request.compare and (last or not number):
                compared.append(self._taken(number, before))
        self._progress(Progress("step", steps, steps))
        return compared

    def seconds(self) -> list[list[dict[str, float]]]:
        """Return, on rank 0, the seconds of every step by rank and phase."""
        keys = (*PHASES, "step")
        own = self._memory.load(np.array([[clock[key] for key in keys] for clock in self.clocks]))
        found = []
        if self._communicator.rank:
            self._communicator.send(own, 0).wait()
        else:
            for rank in self._world:
                table = own if rank == 0 else self._memory.empty(own.shape, "float64")
                if rank:
                    self._communicator.receive(table, rank).wait()
                rows = self._memory.fetch(table)
                found.append([dict(zip(keys, map(float, row), strict=True)) for row in rows])
        self._barrier()  # nobody leaves before everything has arrived
        return found

    def _barrier(self) -> None:
        signal = self._memory.zeros((1,), "float32")
        self._communicator.all_reduce(signal, "sum", self._world).wait()

    def _collect(self, items: Sequence[Item]) -> tuple[dict[Any, Array], dict[Any, float]]:
        rank = self.rank

        def share(item: Item) -> Any:
            if isinstance(item.key, tuple):
                microbatch, tensor = item.key
                return rank.output(microbatch, tensor, item.placements)
            return rank.kept(item.tensor, item.placements)

        return collect(items, share, self._job.lowered, self._communicator, self._memory)

    def _taken(self, number: int, before: Mapping[str, Array] | None) -> _Step:
        lowered = self._job.lowered
        parameters = {state.input for state in lowered.graph.states if state.role is Role.PARAMETER}
        outputs, apart = self._collect(output_items(lowered))
        gradients, apart_gradients = self._collect(gradient_items(lowered))
        updated, apart_updated = self._collect([item for item in state_items(lowered) if item.tensor in parameters])
        return _Step(number, before, outputs, gradients, updated, apart | apart_gradients | apart_updated)


def run_rank(
    job: Job,
    communicator: Communicator,
    memory: Memory,
    engine: Engine,
    *,
    progress: ProgressCallback,
    device: str,
    release: Callable[[], None],
) -> RunReport | None:
    """Run a job's share of one rank; rank 0 returns the report.

    Args:
        job: What to run.
        communicator: Reaches the other ranks.
        memory: Where tensors live.
        engine: Computes there.
        progress: Told how far it is.
        device: What it computes on, in words.
        release: Called when the other ranks are needed no more.

    Raises:
        AutoparError: If the model cannot be run.
    """
    session = _Session(job, communicator, memory, engine, progress)
    steps = session.run()
    seconds = session.seconds()
    num_models = engine.num_models
    weights, batches, departed = session.weights, session.batches, tuple(session.rank.departed)
    release()
    if communicator.rank:
        return None
    del session  # its memory is needed for the whole model
    engine.clear()
    lowered, compared, alone, total = job.lowered, list[StepComparison](), 0.0, len(steps)
    if steps:
        progress(Progress("compare", 0, total))
        single = OneDevice(job.part, job.constants, memory, engine)
    while steps:
        comparison, alone = _compare(job, weights, batches, single, steps.pop(0))
        compared.append(comparison)
        progress(Progress("compare", len(compared), total))
    timeline, predicted = predict(lowered.program, job.costs)
    steady = [clocks[1:] or clocks for clocks in seconds]
    ranges = device_ranges((stage.devices for stage in lowered.program.stages), lowered.program.shares)
    return RunReport(
        summary=job.summary,
        model=lowered.graph.name,
        ranks=job.request.ranks,
        backend=job.request.backend,
        device=device,
        seed=job.request.seed,
        drawn=weights.num_drawn,
        tolerance=job.tolerance,
        compared=tuple(compared),
        num_models=num_models,
        measured_seconds=max(median(clock["step"] for clock in clocks) for clocks in steady),
        predicted_seconds=timeline.step_seconds,
        low_seconds=_tenth(steady, 0.1),
        high_seconds=_tenth(steady, 0.9),
        measured_share=timeline.measured,
        departed=departed,
        first_seconds=max(clocks[0]["step"] for clocks in seconds),
        unpartitioned_seconds=alone,
        stages=tuple(
            StageSeconds(number, _mean(steady[slice(*devices)]), times)
            for number, (devices, times) in enumerate(zip(ranges, predicted, strict=True))
        ),
    )


def _tenth(ranks: Sequence[Sequence[Mapping[str, float]]], share: float) -> float:
    """Return the time that a share of the steps stays below, of the slowest rank of each."""
    steps = [max(clock["step"] for clock in clocks) for clocks in zip(*ranks, strict=True)]
    return float(np.quantile(steps, share))


def _mean(ranks: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, float]:
    """Return seconds by phase: the median over steps, then the mean over ranks."""
    return {phase: sum(median(clock[phase] for clock in clocks) for clocks in ranks) / len(ranks) for phase in PHASES}


def _compare(
    job: Job, weights: Weights, batches: Batches, single: OneDevice, step: _Step
) -> tuple[StepComparison, float]:
    """Return how far a step is from the same step on one device, and how long that takes."""
    graph, tolerance = job.lowered.graph, job.tolerance
    program = job.lowered.program
    taken = [
        (index, data)
        for index in range(program.num_microbatches)
        for part, data in enumerate(cut(batches(step.number, index), job.part, job.parts))
        if has_part(program, part, job.parts, index)
    ]
    data = [own for _, own in taken]
    known = step.before or {}
    content = [state for state in graph.states if state.role is not Role.GRADIENT]
    states = {state.input: known[state.input] if state.input in known else weights(state.input) for state in content}
    since = time.perf_counter()
    expected = joined(single.step(data, states), [index for index, _ in taken])
    seconds = time.perf_counter() - since
    if not expected.gradients:
        return StepComparison(step.number + 1, None, (_outputs("outputs", step, expected, tolerance),)), seconds
    slack = _slack(single, data[-1], states, expected, tolerance)
    deviations = (
        _outputs("loss", step, expected, tolerance),
        deviation("gradients", step.gradients, expected.gradients, tolerance, step.copies),
        deviation("parameters", step.parameters, expected.parameters, tolerance, step.copies, slack),
    )
    loss = float(sum(np.sum(np.asarray(step.outputs[key], np.float64)) for key in step.outputs))
    return StepComparison(step.number + 1, finite(loss), deviations), seconds


def _outputs(what: str, step: _Step, expected: Unpartitioned, tolerance: float) -> Deviation:
    return deviation(what, step.outputs, expected.outputs, tolerance, step.copies)


def _slack(
    single: OneDevice,
    data: Mapping[str, Array],
    states: Mapping[str, Array],
    expected: Unpartitioned,
    tolerance: float,
) -> dict[str, Array]:
    """Return how far each new parameter moves if gradients move by what is tolerated."""
    sizes = scales(expected.gradients)
    lowest, highest = dict(expected.parameters), dict(expected.parameters)
    for sign in (-1, 1):
        gradients = {
            name: array + np.asarray(sign * tolerance * sizes[name], array.dtype)
            for name, array in expected.gradients.items()
        }
        for name, array in single.update(data, states, gradients).items():
            lowest[name], highest[name] = np.minimum(lowest[name], array), np.maximum(highest[name], array)
    return {name: highest[name] - lowest[name] for name in lowest}

"""What a comparison finds, as records that print and serialise."""

from dataclasses import dataclass

from autopar.plan import HistoryPoint, Job, ModelInfo, PhaseTime, Plan

COMPARISON_VERSION = 2


def planner(solver: str) -> str:
    """Return the name of a method: our planner with a solver of the placements."""
    return f"planner: {solver}"


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """One plan of a method.

    Attributes:
        summary: The plan in one line, with the devices it leaves free.
        objective: Step time in seconds by the planner's formula.
        step_seconds: Step time in seconds by the simulator.
        mfu: Model FLOPs over peak FLOPs of the devices it uses in one simulated step.
        peak_bytes: Peak memory of the fullest device.
    """

    summary: str
    objective: float
    step_seconds: float
    mfu: float
    peak_bytes: float

    @classmethod
    def of(cls, plan: Plan, gpus: int) -> "PlanFigures":
        """Return the figures of a simulated plan for a job on a number of devices."""
        simulated = plan.simulated
        assert simulated is not None, "plans are simulated before they are compared"
        peak = max(stage.peak for stage in simulated.stages)
        free = gpus - plan.job.gpus
        summary = f"{plan.summary}; {free} of {gpus} GPUs are left free" if free else plan.summary
        return cls(summary, plan.objective, simulated.step_seconds, simulated.mfu, peak)


@dataclass(frozen=True, slots=True)
class Result:
    """What one method came to.

    Attributes:
        method: "planner: NAME" for our planner with a solver of the placements, or the name of a baseline.
        termination: "optimal", "exhausted", "time limit", "interrupted", or "infeasible" if nothing it tried fits.
        plans: Its best plans by simulated step time; empty if it found none.
        bound: Step seconds by the formula that no plan of the space can beat; 0 if the method proves nothing.
        configurations: Size of the space: combinations of pipeline degree, mesh and microbatches, for grid search plans
            by degrees; 0 if the method does not list it.
        solved: How many of them were solved; plans that were priced, for methods that state degrees.
        phases: Wall time of each phase, and peak memory of the process at its end.
        note: Why there is no plan, if there is none, and what else is to be known.
        history: When which step time was reached.
    """

    method: str
    termination: str
    plans: tuple[PlanFigures, ...]
    bound: float
    configurations: int
    solved: int
    phases: tuple[PhaseTime, ...]
    note: str = ""
    history: tuple[HistoryPoint, ...] = ()

    @classmethod
    def of(cls, method: str, plan: Plan, gpus: int) -> "Result":
        """Return the result of a method that found a plan for a job on a number of devices."""
        search = plan.search
        assert search is not None, "the best plan tells how it was found"
        plans = tuple(PlanFigures.of(each, gpus) for each in (plan, *plan.alternatives))
        bound = search.bound
        return cls(
            method,
            search.termination,
            plans,
            bound,
            search.configurations,
            search.solved,
            search.phases,
            history=search.history,
        )

    @property
    def best(self) -> PlanFigures | None:
        """The plan with the least simulated step time; None if there is none."""
        return self.plans[0] if self.plans else None

    @property
    def gap(self) -> float | None:
        """How much lower than the objective the optimum can be, relative to it; None if nothing is proven."""
        if self.best is None or self.bound <= 0:
            return None
        return max(0.0, 1.0 - self.bound / self.best.objective)

    @property
    def seconds(self) -> float:
        """Wall time from the request to the ranked plans, import and discovery included, as in `history`."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def search_seconds(self) -> float:
        """Wall time from the prepared job to the ranked plans."""
        return sum(phase.seconds for phase in self.phases if phase.name in ("search", "simulate"))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Methods side by side on one job.

    Attributes:
        model: The model.
        job: The request.
        time_limit: Seconds each method was given; None for no limit.
        results: Our planner first, then baselines and our planner with other solvers; short if it was interrupted.
        version: Version of this format.
    """

    model: ModelInfo
    job: Job
    time_limit: float | None
    results: tuple[Result, ...]
    version: int = COMPARISON_VERSION

    @property
    def ours(self) -> Result:
        """The result of our planner."""
        return self.results[0]

    @property
    def rival(self) -> Result | None:
        """The baseline with the least simulated step time; None if none has a plan."""
        found = [(result.best.step_seconds, result) for result in self.results[1:] if result.best is not None]
        return min(found, key=lambda item: item[0], default=(0.0, None))[1]

    @property
    def speedup(self) -> float | None:
        """How many times faster our best plan is than the best of all baselines, simulated; None if either is none."""
        rival = self.rival.best if self.rival is not None else None
        ours = self.ours.best
        return rival.step_seconds / ours.step_seconds if rival is not None and ours is not None else None

    @property
    def interrupted(self) -> bool:
        """Whether somebody stopped it."""
        return any(result.termination == "interrupted" for result in self.results)


def nothing(
    method: str, why: str, phases: tuple[PhaseTime, ...], configurations: int = 0, solved: int = 0, note: str = ""
) -> Result:
    """Return the result of a method that found no plan."""
    return Result(method, why, (), 0.0, configurations, solved, phases, note)

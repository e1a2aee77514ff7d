"""How a plan was found: what was searched, what was proven, and what another search would have found."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Wall time of one phase of the search, and the process's peak memory at its end.

    With workers it has what each of them took at most besides; pages that several share count for each.
    """

    name: str
    seconds: float
    peak_bytes: float


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """What was known at some time of a search.

    Attributes:
        seconds: Since the search was asked for, import and discovery included.
        objective: Of the best plan so far, in seconds; a history begins with the first.
        bound: No plan of the space has a lower objective, as far as was proven then, in seconds.
    """

    seconds: float
    objective: float
    bound: float


@dataclass(frozen=True, slots=True)
class SearchReport:
    """How the plan was found.

    Attributes:
        solver: Name of the solver of the placement problems.
        termination: "optimal" (gap proven to be within tolerance), "exhausted" (whole space searched, gap left),
            "time limit" or "interrupted".
        objective: Best objective in seconds.
        bound: No plan of the declared space has a lower objective, in seconds.
        space: The declared space, in words.
        configurations: Number of (pipeline degree, mesh, microbatches) combinations in it.
        solved: How many of them were solved.
        pruned: How many were excluded by their bound.
        phases: Where the time went.
        history: What was known when; seconds ascend, objectives never rise, bounds never fall.
        complete: No plan that is not akin to one of the best few has a lower objective, in seconds; 0 if unknown.
        cut: Placement problems that were cut by their limit of work, or of time.
        cached: Whether the answer was found before and kept; all else is of the search that found it.
    """

    solver: str
    termination: str
    objective: float
    bound: float
    space: tuple[str, ...]
    configurations: int
    solved: int
    pruned: int
    phases: tuple[PhaseTime, ...]
    history: tuple[HistoryPoint, ...] = ()
    complete: float = 0.0
    cut: int = 0
    cached: bool = False

    @property
    def least(self) -> float:
        """The least objective found, in seconds: the plan's own, or less where the simulator ranks others first."""
        return min([self.objective, *(point.objective for point in self.history[-1:])])

    @property
    def gap(self) -> float:
        """How much lower than the objective the optimum can be, relative to the objective."""
        return max(0.0, 1.0 - self.bound / self.objective) if self.objective > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Rival:
    """What another way to search would have found, at the same costs and in the same simulator.

    Attributes:
        method: The way, in words.
        space: What it searched, in words.
        summary: Its best plan in one line; "" if none of its plans fits.
        step_seconds: Of that plan, simulated; None without one.
        peak_bytes: On the fullest device, simulated; None without one.
        tried: Plans that were priced.
        plans: Plans of its space.
        stopped: "" if it ended by itself, else "time limit" or "interrupted".
        seconds: How long it took.
    """

    method: str
    space: str
    summary: str
    step_seconds: float | None
    peak_bytes: float | None
    tried: int
    plans: int
    stopped: str
    seconds: float

"""Answers about size, as data."""

from dataclasses import dataclass

from autopar.plan import Plan
from autopar.shortage import Shortage


@dataclass(frozen=True, slots=True)
class Relaxation:
    """A change of the request with which a plan fits.

    Attributes:
        what: The change in words.
        option: What to type for it.
        plan: The plan it leads to, in one line.
        step_seconds: Its simulated step time.
        peak_bytes: What its fullest stage needs.
        gpus: Number of devices it runs on.
        searched: Whether the search for the fastest such plan was finished; else there may be a faster one.
    """

    what: str
    option: str
    plan: str
    step_seconds: float
    peak_bytes: float
    gpus: int
    searched: bool


@dataclass(frozen=True, slots=True)
class Infeasibility:
    """Why nothing fits, and what would.

    Attributes:
        gpus: Number of devices.
        shortage: The thriftiest plan found.
        proven: Whether it is proven that nothing fits; else nothing was found.
        conflict: What excludes each other: without any one of them a plan was found.
        complete: Whether each member was dropped and tried to the end, and numbers of GPUs, too; False if time ran out
            or somebody interrupted: then members may be idle, and others and ways out lacking.
        relaxations: Ways out, the fastest plan per device second first.
        interrupted: Whether somebody interrupted.
    """

    gpus: int
    shortage: Shortage
    proven: bool
    conflict: tuple[str, ...]
    complete: bool
    relaxations: tuple[Relaxation, ...]
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class Looked:
    """What was found out about one number of GPUs.

    Attributes:
        gpus: The number.
        outcome: "meets" the goal, "fits" without meeting it, "fails", or "skipped".
        why: Why it fails or is not enough, or which bound says so.
        proven: Whether `why` is proven.
        step_seconds: Simulated step time of its best plan; None if there is none.
        peak_bytes: Bytes of its fullest stage; None if there is none.
        cost: Price of a step, in the currency of the price; None without a price.
        plan: The plan in one line; "" if there is none.
    """

    gpus: int
    outcome: str
    why: str = ""
    proven: bool = False
    step_seconds: float | None = None
    peak_bytes: float | None = None
    cost: float | None = None
    plan: str = ""


@dataclass(frozen=True, slots=True)
class Sizing:
    """How many GPUs a goal takes.

    Attributes:
        goal: The goal in words.
        gpus: The answer; None if no number that was looked at meets it.
        proven: Whether it is proven that no other number that fills nodes is a better answer.
        looked: What was found out, by number of GPUs.
        plan: The plan for the answer.
        tokens: Tokens of a step, or samples if the model has none.
        unit: "token" or "sample".
        gpu_hour_price: Price of a GPU for an hour; None if there is none.
        hosted: The least number on which a plan fits that offloads to host memory; None if none below `gpus` is known.
    """

    goal: str
    gpus: int | None
    proven: bool
    looked: tuple[Looked, ...]
    plan: Plan | None
    tokens: int
    unit: str
    gpu_hour_price: float | None = None
    hosted: Looked | None = None

"""What a number of GPUs is to be found for, and when a plan meets it."""

import math
from dataclasses import dataclass
from enum import StrEnum

from autopar.errors import JobError
from autopar.units import format_seconds

SECONDS_PER_HOUR = 3600.0


def price_per_million(hour_price: float, step_seconds: float, items: int) -> float:
    """Return the price of a million tokens, or samples.

    Args:
        hour_price: Price of all devices for an hour.
        step_seconds: Duration of a step.
        items: Tokens, or samples, of a step.
    """
    return hour_price * step_seconds / SECONDS_PER_HOUR / items * 1e6


class Per(StrEnum):
    """What a budget is for."""

    STEP = "step"
    MILLION = "million"
    RUN = "run"


@dataclass(frozen=True, slots=True)
class Goal:
    """What is wanted.

    With neither a time nor a budget a plan only has to fit.

    Attributes:
        target_seconds: Simulated step time that is fast enough.
        budget: Price that is low enough, in the currency of `gpu_hour_price`.
        per: What the budget is for: a step, a million tokens (samples of models without tokens), or a run.
        steps: Steps of a run.
        gpu_hour_price: Price of a GPU for an hour.

    Raises:
        JobError: If a number is not positive, or the goal lacks one.
    """

    target_seconds: float | None = None
    budget: float | None = None
    per: Per = Per.STEP
    steps: int | None = None
    gpu_hour_price: float | None = None

    def __post_init__(self) -> None:
        for name in ("target_seconds", "budget", "steps", "gpu_hour_price"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise JobError(f"{name.replace('_', ' ')} of {value:g}", hint="give a number above 0")
        if self.budget is not None and self.target_seconds is not None:
            raise JobError("a target time and a budget at once", hint="give one of them: the table has time and price")
        if self.budget is not None and self.gpu_hour_price is None:
            raise JobError(
                "a budget without a price",
                hint="say what a GPU costs: --gpu-hour-price 2.50, or gpu_hour_price in the cluster file",
            )
        if self.per is Per.RUN and self.steps is None:
            raise JobError("a budget for a run without its length", hint="--steps N says how many steps it has")

    def price(self, gpus: int, step_seconds: float, items: int) -> float | None:
        """Return the price of what the budget is for; None without a price.

        Args:
            gpus: Number of devices.
            step_seconds: Duration of a step.
            items: Tokens, or samples, of a step.
        """
        if self.gpu_hour_price is None:
            return None
        step = gpus * step_seconds * self.gpu_hour_price / SECONDS_PER_HOUR
        match self.per:
            case Per.STEP:
                return step
            case Per.MILLION:
                return price_per_million(gpus * self.gpu_hour_price, step_seconds, items)
            case Per.RUN:
                assert self.steps is not None, "checked when made"
                return step * self.steps

    def fact(self, unit: str) -> str:
        """Return what a plan that meets the goal does, in words; `unit` is "token" or "sample"."""
        if self.target_seconds is not None:
            return f"a step of at most {format_seconds(self.target_seconds)}"
        if self.budget is not None:
            return f"a plan at which {self._of(unit)} costs at most {self.budget:g}"
        return "a plan that fits"

    def raised_to(self, least: float) -> str:
        """Return a hint to raise the goal to a time in seconds or to a price, rounded up to three digits.

        >>> Goal(target_seconds=0.1).raised_to(0.123456), Goal(budget=1.0, gpu_hour_price=2.0).raised_to(71.23)
        ('raise --target-time to at least 0.124', 'raise --budget to at least 71.3')
        """
        digit = 10.0 ** (math.floor(math.log10(least)) - 2)
        rounded = math.ceil(least / digit * (1 - 1e-9)) * digit
        option = "--budget" if self.target_seconds is None else "--target-time"
        return f"raise {option} to at least {rounded:.3g}"

    def _of(self, unit: str) -> str:
        return {Per.STEP: "a step", Per.MILLION: f"a million {unit}s", Per.RUN: f"a run of {self.steps} steps"}[
            self.per
        ]

    def words(self, unit: str) -> str:
        """Return the goal in words; `unit` is "token" or "sample"."""
        which = "the fastest plan" if self.budget is not None else "the fewest GPUs"
        joint = f"at which {self._of(unit)} costs at most {self.budget:g}" if self.budget is not None else ""
        return f"{which} {joint}" if joint else f"{which} with {self.fact(unit)}"

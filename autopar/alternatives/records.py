"""What is found out about the alternatives to a plan."""

from dataclasses import dataclass

from autopar.plan import Simulated


@dataclass(frozen=True, slots=True)
class Alternative:
    """One decision with another value, and all others free.

    Attributes:
        decision: Which one, in the field's words ("pp", "tp", "microbatches", ...).
        value: The other value, as text.
        outcome: "plan" if one was found, "does not fit" if none fits in memory, "not possible" if the request excludes
            the value, "none found" if time ran out before there was a plan, "not looked at" if it was over before.
        why: What is missing, or what excludes it; "" if there is a plan.
        plan: The best plan found in one line; "" without one.
        simulated: The simulator's verdict on that plan; None without one.
        bound: No plan with this value has a lower objective, in seconds; 0 if unknown.
        complete: Whether the search ended by itself; else there may be a better plan with this value.
    """

    decision: str
    value: str
    outcome: str
    why: str = ""
    plan: str = ""
    simulated: Simulated | None = None
    bound: float = 0.0
    complete: bool = False


@dataclass(frozen=True, slots=True)
class Limit:
    """What limits a plan.

    Attributes:
        memory_share: Bytes of the fullest stage as a share of the limit.
        stage: The fullest stage.
        raised: The memory limit tried, in bytes.
        more: The best plan found under that limit.
        parts: Where the step goes, in seconds, the largest part first.
    """

    memory_share: float
    stage: int
    raised: float
    more: Alternative
    parts: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Weighing:
    """A plan's decisions and what their alternatives cost.

    Attributes:
        plan: The plan in one line.
        simulated: The simulator's verdict on it.
        decisions: Name and value of every decision, in words.
        alternatives: What was found out, decision by decision, neighbouring values first.
        limit: What limits the plan.
        again: The job solved again as it is; None if the plan's own search was not cut off.
        seconds: How long it took.
        stopped: Why it ended early: "", "time limit" or "interrupted".
    """

    plan: str
    simulated: Simulated
    decisions: tuple[tuple[str, str], ...]
    alternatives: tuple[Alternative, ...]
    limit: Limit
    again: Alternative | None
    seconds: float
    stopped: str = ""

    @property
    def faster(self) -> Alternative | None:
        """The fastest plan of the same job that turned up and beats the plan; None if none does."""
        found = [own for own in (*self.alternatives, self.again) if own is not None and own.simulated is not None]
        best = min(found, key=_step, default=None)
        return best if best is not None and _step(best) < self.simulated.step_seconds else None


def _step(own: Alternative) -> float:
    assert own.simulated is not None, "it has a plan"
    return own.simulated.step_seconds

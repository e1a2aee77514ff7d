"""Classes of rows and what predictions of each are to reach: the gates of validation.

A row belongs to the first class that it fits. Gates are medians and means of the absolute error of the step time; those
of memory, of ranked plans and of posed rows have functions of their own.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from autopar.validation.run import Outcome
from autopar.validation.score import Errors, errors

POSED = 0.85
"""Share of the rows with stated degrees that are to be posed."""
BEST_PLAN = 0.85
"""Share of the groups whose plan predicted best is to be about as fast as the best."""
MEMORY = (0.04, 0.07, 0.05)
"""Median and mean error of peak memory, and the share of rows that may be predicted too low."""
TOO_LOW = 0.95
"""Share of the measured memory below which a prediction is too low."""


@dataclass(frozen=True, slots=True)
class Gate:
    """A class of rows.

    Attributes:
        name: What rows of it have in common.
        holds: Whether an outcome belongs to it.
        median: Median of the absolute error to stay below; None without a gate.
        mean: Mean of the absolute error to stay below; None without a gate.
    """

    name: str
    holds: Callable[[Outcome], bool]
    median: float | None = None
    mean: float | None = None


def _sources(*names: str) -> Callable[[Outcome], bool]:
    return lambda outcome: outcome.row.source in names


def _dense(device: str, precision: str) -> Callable[[Outcome], bool]:
    def holds(outcome: Outcome) -> bool:
        text = (outcome.row.precision or "").lower()
        narrow = "8 bits" if re.search(r"fp8|fp4|int8", text) else "bf16"
        return narrow == precision and re.search(device, outcome.row.gpu or "") is not None

    return holds


_BLACKWELL = r"G?B[23]00|Blackwell"
GATES = (
    Gate("LoRA", lambda outcome: outcome.has_adapters),
    Gate("mixture of experts", lambda outcome: outcome.has_experts, 0.10, 0.15),
    Gate("Megatron-LM literature", _sources("sc21t1", "sc21t2", "korth"), 0.04),
    Gate("vTrain, several nodes", _sources("vtm"), None, 0.06),
    Gate("vTrain, one node", _sources("vts"), None, 0.065),
    Gate("dense bf16 on Hopper", _dense(r"H[128]00|H20", "bf16"), 0.06, 0.10),
    Gate("dense bf16 on Blackwell", _dense(_BLACKWELL, "bf16"), 0.06, 0.10),
    Gate("dense in 8 or 4 bits on Hopper", _dense(r"H[128]00|H20", "8 bits"), 0.06, 0.10),
    Gate("dense in 8 or 4 bits on Blackwell", _dense(_BLACKWELL, "8 bits"), 0.06, 0.10),
    Gate("dense on A100", _dense("A100", "bf16")),
    Gate("dense on other devices", lambda outcome: True),
)


def by_class(outcomes: Sequence[Outcome]) -> list[tuple[Gate, Errors]]:
    """Return the classes that have predicted rows, with the errors of these."""
    members: dict[str, list[float]] = {gate.name: [] for gate in GATES}
    for outcome in outcomes:
        if outcome.predicted is not None:
            members[next(gate.name for gate in GATES if gate.holds(outcome))].append(outcome.error)
    return [(gate, found) for gate in GATES if (found := errors(members[gate.name])) is not None]


def posed(outcomes: Sequence[Outcome]) -> tuple[int, int]:
    """Return how many rows state degrees and were predicted, and how many state degrees."""
    stated = [outcome for outcome in outcomes if outcome.row.states_degrees]
    return sum(outcome.predicted is not None for outcome in stated), len(stated)


@dataclass(frozen=True, slots=True)
class MemoryErrors:
    """Predicted peak memory against what was measured.

    Attributes:
        rows: Rows that state memory and were predicted.
        median: Median of the absolute errors.
        mean: Their mean.
        too_low: Share of rows predicted below `TOO_LOW` of what was measured.
        bias: Mean of the errors with sign.
    """

    rows: int
    median: float
    mean: float
    too_low: float
    bias: float


def memory_errors(outcomes: Sequence[Outcome]) -> MemoryErrors | None:
    """Return the errors of predicted peak memory where it was measured; None if it nowhere was."""
    found = [outcome.memory_error for outcome in outcomes]
    known = [value for value in found if value is not None]
    if not known:
        return None
    sizes = [abs(value) for value in known]
    low = sum(1 + value < TOO_LOW for value in known)
    return MemoryErrors(len(known), median(sizes), fmean(sizes), low / len(known), fmean(known))


@dataclass(frozen=True, slots=True)
class Rival:
    """A source's own simulator beside ours, on the same rows.

    Attributes:
        source: The source.
        what: "step time" or "memory".
        rows: Rows on which both predict.
        ours: Median and mean of our absolute errors.
        theirs: Median and mean of theirs.
    """

    source: str
    what: str
    rows: int
    ours: tuple[float, float]
    theirs: tuple[float, float]


def rivals(outcomes: Sequence[Outcome]) -> list[Rival]:
    """Return what simulators of the sources themselves reach, beside ours on the same rows."""
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for outcome in outcomes:
        row = outcome.row
        if outcome.predicted is None or outcome.measured is None:
            continue
        if row.claimed_seconds:
            theirs = row.claimed_seconds / outcome.measured - 1
            pairs.setdefault((row.source, "step time"), []).append((outcome.error, theirs))
        if row.claimed_bytes and row.memory_bytes and outcome.memory_error is not None:
            theirs = row.claimed_bytes / row.memory_bytes - 1
            pairs.setdefault((row.source, "memory"), []).append((outcome.memory_error, theirs))
    found = []
    for (source, what), both in sorted(pairs.items()):
        ours, theirs_ = ([abs(pair[side]) for pair in both] for side in (0, 1))
        found.append(Rival(source, what, len(both), (median(ours), fmean(ours)), (median(theirs_), fmean(theirs_))))
    return found

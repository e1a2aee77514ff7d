"""Kernels and collectives of a data folder against the cost model: one line per group of timings."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.cost.accuracy import KernelError, gemm_report, memory_report
from autopar.cost.measured_collectives import Timing, collective_report
from autopar.validation.score import errors

GEMMS, MEMORY_OPS, COLLECTIVES = "gemm.json", "memory_bound_ops.json", "comm.json"
"""Files of a data folder, all of which may be absent."""


@dataclass(frozen=True, slots=True)
class MicroError:
    """Errors of the timings of one group, as shares of the measured time.

    Attributes:
        kind: "products", "memory-bound ops" or "collectives".
        group: What they have in common.
        timings: How many there are.
        mean: Mean of the absolute errors.
        median: Their median.
        p90: What 90 % of them do not exceed.
        bias: Mean with sign; below 0 the prediction is too fast.
    """

    kind: str
    group: str
    timings: int
    mean: float
    median: float
    p90: float
    bias: float


def micro_errors(folder: Path) -> tuple[MicroError, ...]:
    """Return the errors of all files of a data folder that are there.

    Raises:
        DataError: If kernel times are malformed.
        ClusterError: If timings of collectives are.
    """
    found: list[MicroError] = []
    if (folder / GEMMS).exists():
        found += _kernels("products", gemm_report(folder / GEMMS))
    if (folder / MEMORY_OPS).exists():
        found += _kernels("memory-bound ops", memory_report(folder / MEMORY_OPS))
    if (folder / COLLECTIVES).exists():
        found += _collectives(collective_report(folder / COLLECTIVES).timings)
    return tuple(found)


def _kernels(kind: str, reported: Sequence[KernelError]) -> list[MicroError]:
    return [MicroError(kind, e.group, e.kernels, e.mean, e.median, e.p90, e.bias) for e in reported]


def _collectives(timings: Sequence[Timing]) -> list[MicroError]:
    groups: dict[str, list[float]] = {}
    for timing in timings:
        part = "held out" if timing.held_out else "fitted"
        for name in (f"{timing.operation}, {timing.gpu}, {part}", f"all, {part}"):
            groups.setdefault(name, []).append(timing.error)
    found = []
    for name, values in sorted(groups.items(), key=lambda item: (item[0].startswith("all"), item[0])):
        each = errors(values)
        assert each is not None, "a group has timings"
        found.append(MicroError("collectives", name, each.rows, each.mean, each.median, each.p90, each.bias))
    return found

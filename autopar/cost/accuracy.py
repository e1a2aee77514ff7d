"""How well costs of single kernels meet published measurements.

Records are those of `published/gemm.json` and `published/memory_bound_ops.json`: kernel times of microsoft/vidur and
other sources. The constants of `autopar.cost.gemm` and of the presets were fitted to the shapes for which `is_held_out`
is false; the shapes for which it is true share no (N, K) with them.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from autopar.cluster import PRESETS, Cluster, Device
from autopar.cost.arrays import FloatArray, IntArray
from autopar.cost.model import CostModel
from autopar.errors import DataError
from autopar.ir.graph import Op

# A device that is no preset, measured by the same authors: it shows what the shared constants are worth elsewhere.
# NVIDIA A40 data sheet; launch, efficiency and bandwidth are its GEMM fit.
_A40 = Device(
    "A40", (("half", 149.7e12),), 48e9, 0.696e12, launch=1.8e-6, gemm_efficiency=0.787, attention_efficiency=0.4,
    bandwidth_efficiency=0.75, num_sms=84,
)  # fmt: skip
CLUSTERS: Mapping[str, Cluster] = {
    "A100-SXM-80GB": PRESETS["a100-80"],
    "H100-SXM-80GB": PRESETS["h100"],
    "A40": replace(PRESETS["a100-80"], name="a40", device=_A40),
}
"""Cluster by the name records give its device."""

VIDUR = "microsoft/vidur"  # best shapes of a sweep and tables of other sources say nothing of a given shape

_MEMORY_KINDS: Mapping[str, Mapping[str, str]] = {
    "norms": dict.fromkeys(("input_layernorm", "post_attention_layernorm"), "RMSNormalization"),
    "activations": {"mlp_act": "Swish"},
    "additions": {"add": "Add"},
}
"""Kind of our ops by class and name in the records."""


@dataclass(frozen=True, slots=True)
class KernelError:
    """Errors of the kernels of one group; shares of the measured time.

    Attributes:
        group: What they have in common.
        kernels: How many there are.
        mean: Mean of the absolute errors.
        median: Their median.
        p90: What 90 % of them do not exceed.
        bias: Mean of the errors with their sign; below 0 the prediction is too fast.
    """

    group: str
    kernels: int
    mean: float
    median: float
    p90: float
    bias: float


class Gemm(msgspec.Struct, frozen=True):
    """A published time of a product of (m, k) by (k, n)."""

    source: str
    gpu: str
    m: int
    n: int
    k: int
    time_us: float | None = None


class _MemoryOp(msgspec.Struct, frozen=True):
    gpu: str
    op: str
    min_bytes: float
    time_us: float


def is_held_out(n: int, k: int) -> bool:
    """Whether products by a matrix of (k, n) were left out of the fit: a third of them, drawn by a hash."""
    return int(hashlib.sha256(f"{n}x{k}".encode()).hexdigest(), 16) % 3 == 0


def read_gemms(path: str | Path) -> list[Gemm]:
    """Return the records of single products; best shapes of a sweep and tables of other sources are left out.

    Raises:
        DataError: If the file cannot be read or holds other records.
    """
    return [record for record in _read(path, Gemm) if VIDUR in record.source and record.time_us]


def gemm_report(path: str | Path) -> tuple[KernelError, ...]:
    """Return the errors of matrix products by device, least M and part of the data.

    Args:
        path: File of records: source, gpu, m, n, k, time_us.

    Raises:
        DataError: If the file cannot be read or holds other records.
    """
    found = []
    records = read_gemms(path)
    for gpu, cluster in CLUSTERS.items():
        rows = [record for record in records if record.gpu == gpu]
        if not rows:
            continue
        m, n, k = (np.array([getattr(row, name) for row in rows], np.int64) for name in ("m", "n", "k"))
        errors = _product_seconds(CostModel(cluster), m, n, k) / _seconds(row.time_us or 0.0 for row in rows) - 1
        held = np.array([is_held_out(row.n, row.k) for row in rows])
        for least in (64, 1024):
            for part, chosen in (("fitted", ~held), ("held out", held), ("all", held | True)):
                if (chosen & (m >= least)).any():
                    found.append(_error(f"{gpu}, M >= {least}, {part}", errors[chosen & (m >= least)]))
    return tuple(found)


def memory_report(path: str | Path) -> tuple[KernelError, ...]:
    """Return the errors of kernels bound by memory by device and class.

    Args:
        path: File of records: gpu, op, min_bytes, time_us.

    Raises:
        DataError: If the file cannot be read or holds other records.
    """
    found = []
    records = _read(path, _MemoryOp)
    for gpu, cluster in CLUSTERS.items():
        costs = CostModel(cluster)
        for group, kinds in _MEMORY_KINDS.items():
            rows = [record for record in records if record.gpu == gpu and record.op in kinds]
            if rows:
                # One value that is written has as many bytes as the kernel moves; the kind tells the class.
                sizes = np.array([[row.min_bytes] for row in rows]).astype(np.int64)
                kind = kinds[rows[0].op]
                predicted = costs.op_seconds(Op(group, kind, ("x",), ("y",)), [None], [sizes], {"y": 1.0})
                found.append(_error(f"{gpu}, {group}", predicted / _seconds(row.time_us for row in rows) - 1))
    return tuple(found)


_Record = TypeVar("_Record", Gemm, _MemoryOp)


def _read(path: str | Path, kind: type[_Record]) -> list[_Record]:
    try:
        return msgspec.convert(msgspec.json.decode(Path(path).read_bytes()), list[kind])  # type: ignore[valid-type]
    except (OSError, msgspec.MsgspecError) as error:
        raise DataError(f"{path}: {error}", hint="give a file of published kernel times, as documented") from error


def _product_seconds(costs: CostModel, m: IntArray, n: IntArray, k: IntArray) -> FloatArray:
    a, b, y = (np.stack(pair, axis=1) for pair in ((m, k), (k, n), (m, n)))
    return costs.op_seconds(Op("gemm", "MatMul", ("a", "b"), ("y",)), [a, b], [y], dict.fromkeys("aby", 2.0))


def _seconds(microseconds: Iterable[float]) -> FloatArray:
    return np.array(list(microseconds)) * 1e-6


def _error(group: str, errors: FloatArray) -> KernelError:
    size = np.abs(errors)
    return KernelError(
        group, len(errors), *(float(x) for x in (size.mean(), np.median(size), np.percentile(size, 90), errors.mean()))
    )

"""Fit the constants of matrix products to published kernel times; print them.

    python docs/benchmarks/fit_kernels.py gemm.json

Those of `autopar.cost.gemm` are shared, launch, efficiency and bandwidth are each device's own; all are fitted together
by random steps that shrink, to the mean absolute error of each device. Products that `autopar.cost.accuracy` holds out
are not used.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from usage import show_usage

from autopar.cost import gemm
from autopar.cost.accuracy import CLUSTERS, is_held_out, read_gemms
from autopar.cost.products import Product

Column = NDArray[np.float64]

SHARED = {"PARTIAL": (0.0, 1.0), "EXTRA_K": (0.0, 200.0), "SPLIT_SECONDS": (0.0, 1e-5), "SPLIT_SHARE": (0.0, 1.0)}
SMALL_TILE = (0.5, 1.0)
OWN = {"launch": (0.0, 12e-6), "gemm_efficiency": (0.4, 1.0), "bandwidth_efficiency": (0.4, 1.0)}
STEPS = 6000


def predicted(device: Any, rows: SimpleNamespace) -> Column:
    """Return the seconds of the products of a device's rows."""
    product = Product(np.ones(len(rows.m)), rows.m, rows.n, rows.k)
    compute = gemm.compute_seconds(product, device, device.peak * device.gemm_efficiency)
    return device.launch + gemm.overlapped(
        compute, rows.nbytes / (device.memory_bandwidth * device.bandwidth_efficiency)
    )


def main(path: Path) -> None:
    """Print the constants and their error."""
    rows, devices = {}, {}
    for gpu, cluster in CLUSTERS.items():
        chosen = [row for row in read_gemms(path) if row.gpu == gpu and not is_held_out(row.n, row.k)]
        m, n, k, seconds = np.array([(row.m, row.n, row.k, (row.time_us or 0) * 1e-6) for row in chosen]).T
        rows[gpu] = SimpleNamespace(m=m, n=n, k=k, seconds=seconds, nbytes=2 * (m * k + k * n + m * n))
        devices[gpu] = cluster.device
    bounds = np.array([*SHARED.values(), SMALL_TILE, *(bound for _ in devices for bound in OWN.values())])

    def error(values: Column) -> float:
        for name, value in zip(SHARED, values, strict=False):
            setattr(gemm, name, value)
        gemm.TILES = ((128.0, 1.0), (64.0, values[len(SHARED)]))
        total = 0.0
        for index, (gpu, device) in enumerate(devices.items()):
            own = dict(zip(OWN, values[len(SHARED) + 1 + index * len(OWN) :], strict=False))
            fitted = SimpleNamespace(
                **own, peak=device.peak("half"), memory_bandwidth=device.memory_bandwidth, num_sms=device.num_sms
            )
            total += float(np.abs(predicted(fitted, rows[gpu]) / rows[gpu].seconds - 1).mean())
        return total / len(devices)

    rng, low, width = np.random.default_rng(0), bounds[:, 0], bounds[:, 1] - bounds[:, 0]
    best = low + width / 2
    least = error(best)
    for _ in range(STEPS):
        step = rng.normal(size=len(best)) * width * 0.1 * rng.choice([1, 0.3, 0.1, 0.03])
        candidate = np.clip(best + step * (rng.random(len(best)) < 0.3), low, low + width)
        found = error(candidate)
        if found < least:
            least, best = found, candidate
    names = [*SHARED, "share of the small tile", *(f"{gpu} {name}" for gpu in devices for name in OWN)]
    sys.stdout.writelines(f"{name:40} {value:.4g}\n" for name, value in zip(names, best, strict=True))
    sys.stdout.write(f"mean error of the devices {least:.2%}\n")


if __name__ == "__main__":
    show_usage(__doc__)
    main(Path(sys.argv[1]))

"""Fit the constants of collectives to published timings; print one line per table.

    python docs/benchmarks/fit_collectives.py comm.json

t = latency + f S / bandwidth (1 + (ramp / S) ^ exponent), fitted by weighted least squares on relative errors for each
(ramp, exponent) of a grid; rows far off count less. Rows that `autopar.cost.measured_collectives.split` holds out are
not used.
"""

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from usage import show_usage

from autopar.cost.measured_collectives import bus_factor, measured_seconds, operation, read_rows, split

Column = NDArray[np.float64]

RAMPS = (0.5e6, 1e6, 2e6, 4e6, 6e6, 8e6, 12e6, 16e6, 24e6, 32e6)
EXPONENTS = (0.45, 0.5, 0.6, 0.75, 0.9)  # below, the bandwidth of the largest messages is extrapolated too high
SIMPLER = 0.005
"""A ramp must lower the mean error by this much to be worth two constants."""

POOLED = {
    ("(nccl-tests, 1 A100 node)", None): "A100 8",
    ("trace/a100/AR_GPU8", None): "A100 8",
    ("NVLS from 2MiB", None): "H200 NVLS",
    ("SHARP table", "H200-SXM"): "H200 NVLS",
    ("(1x P6-B200)", None): "B200 NVLS",
    ("SHARP table", "B200"): "B200 NVLS",
    ("h100_dgx/all_reduce", None): "H100",
    ("_NVSWITCH_BW_POINTS", None): "H100",
}
"""Tables of the same thing by different hands that are fitted together."""

NVLS_FROM = {"H200-SXM": 7, "B200": 7}
"""Least group whose all-reduces in the switches are pooled: smaller ones are slower."""


def write(text: str) -> None:
    """Print a line."""
    sys.stdout.write(text + "\n")


def fit(nbytes: Column, seconds: Column, factor: Column) -> tuple[float, float, float, float, float]:
    """Return (mean error, latency, bandwidth, ramp, exponent)."""
    best = None
    for ramp, exponent in [(0.0, 0.5), *((ramp, exponent) for ramp in RAMPS for exponent in EXPONENTS)]:
        moved = factor * (nbytes + (ramp**exponent * nbytes ** (1 - exponent) if ramp else 0.0))
        weight = 1 / seconds
        for _ in range(30):
            columns = np.stack([np.ones_like(moved), moved], 1) * weight[:, None]
            latency, slope = np.linalg.lstsq(columns, seconds * weight, rcond=None)[0]
            if latency < 0:
                latency = 0.0
                slope = (seconds * moved * weight**2).sum() / ((moved * weight) ** 2).sum()
            error = np.abs((latency + slope * moved) / seconds - 1)
            weight = 1 / seconds * np.sqrt(1 / np.maximum(error, 0.01))
        score = error.mean() + (SIMPLER if ramp else 0.0)
        if best is None or score < best[0]:
            best = score, error.mean(), latency, 1 / slope, ramp, exponent
    return best[1:]


def main(path: Path) -> None:
    """Print the fits."""
    rows = read_rows(path)
    tables = defaultdict(list)
    for row, held_out in zip(rows, split(rows), strict=True):
        seconds = measured_seconds(row)
        if held_out or seconds is None or row["bytes"] == 0:
            continue
        name, devices, gpu = operation(row), row["n_gpus"], row.get("gpu")
        pooled = next(
            (pool for (text, of), pool in POOLED.items() if text in row["source"] and of in (None, gpu)), None
        )
        if pooled is not None and "NVLS" in pooled and (devices < NVLS_FROM[gpu] or "off" in row.get("algo", "")):
            continue
        key = (
            (pooled, name, 8 if "NVLS" in pooled else devices, 1)
            if pooled
            else (f"{gpu} {row['source'].split(' HEAD ')[-1]}"[:40], name, devices, row.get("nodes"))
        )
        tables[key].append((row["bytes"], seconds, bus_factor(name, devices)))
    write(
        "table                                    op             n nodes rows  error  latency  bandwidth    ramp  exp"
    )
    for (source, name, devices, nodes), points in tables.items():
        if len(points) < 3:
            continue
        error, latency, bandwidth, ramp, exponent = fit(*np.array(points, float).T)
        write(
            f"{source:40s} {name:14s} {devices:4d} {nodes or 1:3d} {len(points):4d} {error:6.1%} "
            f"{latency * 1e6:6.1f} us {bandwidth / 1e9:6.1f} GB/s {ramp / 1e6:5.1f} MB {exponent:5.2f}"
        )


if __name__ == "__main__":
    show_usage(__doc__)
    main(Path(sys.argv[1]))

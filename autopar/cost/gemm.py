"""Seconds of matrix products from their dims, by tiles and waves.

    seconds  = launch + (compute^4 + memory^4)^(1/4)
    compute  = min over tiles t and splits s of K of
               waves x 2 t^2 (K / s + 80) x SMs / (peak x efficiency x share(t))  (+ the cost of a split)
    waves    = 0.565 max(w, 1) + 0.435 ceil(w),  w = b ceil(M / t) ceil(N / t) s / SMs
    memory   = bytes / (memory bandwidth x bandwidth_efficiency)

A tile of t x t results is computed by one multiprocessor (SM); a wave of them by all. A wave that is filled in part
takes longer than its share, but not a whole wave: tiles of different waves overlap, and libraries have more tile sizes
than the two that are tried here. The 80 more terms per result are the filling of the pipeline. Few tiles with long sums
are split along K, at the price of adding the parts. A device that does not say how many SMs it has computes at its
efficiency whatever the dims.

The constants are shared by all devices; launch, efficiency and bandwidth are each device's own. They were fitted
together to kernel times of A100, H100 and A40 by microsoft/vidur (`gemm_report` in `autopar.cost.accuracy` prints the
error on the shapes that were left out).
"""

import numpy as np

from autopar.cluster import Device
from autopar.cost.arrays import FloatArray, Product

TILES = ((128.0, 1.0), (64.0, 0.77))  # edge of a tile, share of the efficiency it reaches; fit
SPLITS = (1.0, 4.0)  # of K
PARTIAL = 0.565  # share of a wave's time that shrinks with its filling; fit
EXTRA_K = 80.0  # terms per result; fit
SPLIT_SECONDS = 3e-6  # fit
SPLIT_SHARE = 0.16  # of the memory time of writing and reading float32 parts: most stay in the cache; fit
FLOAT32 = 4.0
# fp16 rows that are no multiple of 16 bytes keep batched products from the tensor cores. In BLOOM's topology search
# (bigscience tr11 chronicles) a step took 34 % longer with 108 channels per head than with 216, where 112 and 224
# differ by 3 %, and 27 % longer with 150 than with 144: both mean about 10 TFLOP/s of an A100, a tenth of what
# aligned ones reach.
ALIGNMENT = 8.0
UNALIGNED_SHARE = 1 / 10


def compute_seconds(product: Product, device: Device, rate: float) -> FloatArray:
    """Return the seconds a product takes on the matrix units, (n,).

    Args:
        product: The product.
        device: Tells how many SMs there are, and how fast parts are added.
        rate: FLOP/s of large products.
    """
    return _tiled(product, device, rate) if device.num_sms else np.asarray(product.flops / rate)


def least_seconds(product: Product, device: Device, rate: float) -> FloatArray:
    """Return what is left of `compute_seconds` if all tiles and waves are full; shards add up to it or to more."""
    return 2 * product.batch * product.m * product.n * (product.k + (EXTRA_K if device.num_sms else 0.0)) / rate


def _tiled(product: Product, device: Device, rate: float) -> FloatArray:
    best: FloatArray | None = None
    bandwidth = device.memory_bandwidth * device.bandwidth_efficiency
    parts = 2 * FLOAT32 * SPLIT_SHARE / bandwidth * (product.batch * product.m * product.n)
    for tile, share in TILES:
        tiles = product.batch * np.ceil(product.m / tile) * np.ceil(product.n / tile) / device.num_sms
        per_wave = 2 * tile * tile * device.num_sms / (rate * share)
        for split in SPLITS:
            filling = tiles * split
            waves = PARTIAL * np.maximum(filling, 1.0) + (1 - PARTIAL) * np.ceil(filling)
            seconds = waves * (per_wave * (product.k / split + EXTRA_K))
            if split > 1:
                seconds = seconds + (SPLIT_SECONDS + split * parts)
            best = seconds if best is None else np.minimum(best, seconds)
    assert best is not None
    return best


SUM_EXPONENT = 1.25
"""How far compute and memory hide each other where products of experts add to sums, as 4 is of one large product.

Each tile reads and writes its part of the sum after few terms, as many as an expert has tokens. Chosen on all
weight gradients of the B200 table of MooreThreads/SimuMax, none of which was held out."""


def grouped(product: Product, compute: FloatArray, memory: FloatArray, device: Device, *, sums: bool) -> FloatArray:
    """Return the seconds of the products of all experts of a device.

    Every expert has a product of its own. Where its tiles do not fill the device once, nothing runs beside the reading
    of its matrix; of products of more waves the first one waits for it. The rule was chosen by half of 108 times on
    B200 (Transformer Engine, 20 to 256 experts of 128 to 9832 rows; MooreThreads/SimuMax, b200_bf16_ceperm.json): the
    other half errs by 12 %, as one large product by 32 %.

    Args:
        product: What is multiplied; its batch are the experts.
        compute: Seconds on the matrix units, (n,).
        memory: Seconds of its traffic, (n,).
        device: Tells how many tiles run at once.
        sums: Whether the results are added to sums in memory, as gradients of weights over microbatches are.
    """
    if sums:
        seconds = np.power(compute, SUM_EXPONENT) + np.power(memory, SUM_EXPONENT)
        return np.asarray(np.power(seconds, 1 / SUM_EXPONENT))
    tile, _ = TILES[0]
    waves = np.ceil(product.m / tile) * np.ceil(product.n / tile) / max(device.num_sms, 1)
    exposed = memory / np.maximum(waves, 1.0)
    return exposed + overlapped(compute, memory - exposed)


def overlapped(compute: FloatArray | float, memory: FloatArray) -> FloatArray:
    """Return the seconds of a kernel that computes and moves data at the same time: a little more than the slower.

    >>> round(float(overlapped(1.0, np.array(1.0))), 3), round(float(overlapped(3.0, np.array(1.0))), 3)
    (1.189, 3.009)
    """
    return np.asarray(np.sqrt(np.sqrt(np.square(np.square(compute)) + np.square(np.square(memory)))))

"""Random staging problems, and their routes one by one."""

from collections.abc import Iterator
from itertools import pairwise, product

import numpy as np

from autopar.pipeline_partition.block_ranges import windows
from autopar.staging import Leg, Route, Staging


def random_staging(seed: int) -> Staging:
    """Return a small problem: up to five blocks, six devices, four options, and hand-overs that matter."""
    rng = np.random.default_rng(seed)
    num_blocks, num_devices = int(rng.integers(1, 6)), int(rng.integers(1, 7))
    num_options, columns = int(rng.integers(1, 5)), int(rng.integers(1, 3))
    levels = int(rng.integers((min(num_blocks, num_devices) + 1) // 2, min(num_blocks, num_devices) + 1))
    chain = tuple(int(kind) for kind in rng.integers(0, 3, num_blocks))
    at = windows(tuple(range(num_blocks)) if rng.random() < 0.5 else chain, num_blocks, False).at
    ranges = int(at.max()) + 1
    sizes = rng.integers(1, max(2, min(4, num_devices)), num_options)
    sizes[0] = 1 + num_devices // (levels + 1)
    each = rng.uniform(0.5, 2.0, (num_options, 3))
    work = np.zeros((num_options, ranges))
    for start, row in enumerate(at):
        for length, window in enumerate(row.tolist()):
            if window >= 0:
                work[:, window] = each[:, list(chain[start : start + length + 1])].sum(axis=1)
    shape = (levels, num_options, ranges, columns)
    seconds = work[None, :, :, None] / sizes[None, :, None, None] * rng.uniform(1.0, 1.5, shape)
    if rng.random() < 0.5:
        seconds = np.ceil(4 * seconds) / 4  # ties
    lead = seconds * rng.uniform(0.2, 0.6, shape)
    seconds = np.where(rng.random(shape) < 0.05, np.inf, seconds)
    num_ends, classes = int(rng.integers(1, 4)), rng.integers(0, 2, num_blocks)
    hops = rng.uniform(0.0, float(rng.choice([0.0, 0.3])) + 1e-9, (2, num_ends, num_ends, 2, num_devices))
    return Staging(
        at=at,
        sizes=sizes,
        starts=rng.random((num_options, num_devices)) < 0.95,
        seconds=seconds,
        lead=lead,
        slow=rng.uniform(0.0, 0.1, shape),
        tails=rng.uniform(0.0, float(rng.choice([0.1, 3.0])), shape),
        ends=rng.integers(0, num_ends, num_options),
        classes=classes,
        ahead=hops[0],
        back=hops[1],
        counts=frozenset(int(count) for count in rng.integers(1, levels + 1, levels)),
        follow=float(rng.choice([0.0, 1.0, 7.0])),
        fixed=float(rng.choice([0.0, 0.5])),
    )


def routes(problem: Staging) -> Iterator[Route]:
    """Yield every way to cut the blocks, with every option and column; not all of them are allowed."""
    blocks = problem.num_blocks
    for mask in range(2 ** (blocks - 1)):
        cuts = [0, *(block for block in range(1, blocks) if mask >> (block - 1) & 1), blocks]
        ranges = list(pairwise(cuts))
        choices = product(range(len(problem.sizes)), range(problem.seconds.shape[3]))
        for taken in product(list(choices), repeat=len(ranges)):
            device, legs = 0, []
            for (start, stop), (option, column) in zip(ranges, taken, strict=True):
                legs.append(Leg(start, stop, device, option, column))
                device += int(problem.sizes[option])
            if device == problem.num_devices:
                yield tuple(legs)

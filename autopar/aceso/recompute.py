"""Which ops of a stage run again: caps on what a run of them takes, and the best choice for one stage."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.aceso.cost import CostModel, Stage
from autopar.aceso.profile_database import MIB
from autopar.aceso.stage_loops import FORWARD, KEPT, append_op

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOST_BIG = 3
"""Ops of a layer with the largest activations, which levels of runs tell apart; in GPTs two have nine tenths."""
BIG = 0.04
"""Share of a layer's activations that such an op has at least."""
UNITS = 3000
"""Units that the bytes which a stage lacks are counted in, about."""
ALIKE = 0.04
"""Share of the largest run by which the bytes of two runs differ at least to be told apart."""


@dataclass(frozen=True, slots=True, eq=False)
class Cap:
    """Runs that drop no more than some activations of big ops.

    Attributes:
        following: (kinds, levels) level of a run after a kind has dropped its activation; -1 beyond the cap.
        least: Bytes that the fullest run has at least, if it reaches the cap.
        most: Bytes that it has at most.
    """

    following: Ints
    least: float
    most: float


def caps(kept: Floats, layer: Ints) -> Iterator[Cap]:
    """Yield the caps on runs, ascending; every choice of ops is within one and reaches it.

    Args:
        kept: Bytes that kinds of ops keep.
        layer: The kinds of a layer.
    """
    whole = kept[layer].sum()
    big = [kind for kind in layer[np.argsort(-kept[layer], kind="stable")][:MOST_BIG] if kept[kind] >= BIG * whole]
    sums = np.unique(
        [sum(kept[kind] for k, kind in enumerate(big) if chosen >> k & 1) for chosen in range(2 ** len(big))]
    )
    beside = np.delete(kept, layer)[:-1]  # nothing follows the last op, so it drops nothing
    small = max(float(whole - kept[big].sum()), float(beside.max(initial=0.0))) + float(kept[layer[-1]])
    for count in range(1, len(sums) + 1):
        levels = sums[:count]
        following = np.tile(np.arange(count), (len(kept), 1))
        for kind in big:
            places = np.searchsorted(levels, levels + kept[kind] - 0.5)
            is_there = (places < count) & (np.abs(levels[np.minimum(places, count - 1)] - levels - kept[kind]) < 0.5)
            following[kind] = np.where(is_there, places, -1)
        yield Cap(following, float(levels[-1]), float(levels[-1]) + small)


def choose_quantum(kept: Floats, layer: Ints, near: float) -> float:
    """Return the bytes of a unit, near to some, whose multiples activations of a layer are nearest to from below."""
    tried = MIB * np.arange(max(1, np.floor(near / MIB / 2)), max(1, np.ceil(near / MIB * 1.5)) + 1)
    lost = [(kept[layer] % quantum).sum() for quantum in tried]
    return float(tried[int(np.argmin(lost))])


def choose_ops(model: CostModel, stage: Stage, microbatch: int, behind: int, limit: float) -> tuple[bool, ...] | None:
    """Return the ops that run again in least time so that a stage fits; None if it does not, whatever runs again.

    Unlike the tables of stages, this tells runs apart by the op that they begin with, so their bytes are known.
    """
    bare = replace(stage, again=(False,) * stage.ops)
    lack = model.stage_bytes(bare, microbatch, behind) - limit
    if lack <= 0:
        return bare.again
    table = model.table(stage.tensor, microbatch // stage.data)
    kinds = model.kinds[stage.first : stage.first + stage.ops]
    best: tuple[bool, ...] | None = None
    seconds = np.inf
    caps_left = _run_bytes(table[:, KEPT], np.unique(kinds))[::-1]
    while caps_left:
        cap = caps_left.pop()
        again = _least_time(model, stage, table, cap, (lack + cap) / (behind + 1))
        if again is None:
            continue
        own = float(table[kinds, FORWARD][list(again)].sum())
        if own < seconds:
            best, seconds = again, own
        fullest = model.runs(replace(stage, again=again), table[kinds, KEPT])[1]
        if fullest < cap * (1 - 1e-9):  # runs that are no larger need not drop as much
            caps_left.append(fullest)
    return best


def _run_bytes(kept: Floats, kinds: Ints) -> list[float]:
    """Return bytes that runs of some kinds of ops can have, ascending; of some near each other the largest."""
    sums = np.cumsum(np.concatenate([[0.0], np.where(np.isin(np.arange(len(kept)), kinds), kept, 0.0)]))
    runs = np.unique(np.subtract.outer(sums, sums))
    runs = runs[runs > 0]
    steps = np.floor(runs / (ALIKE * runs[-1]))
    return [float(runs[steps == step].max()) for step in np.unique(steps)]


def _least_time(model: CostModel, stage: Stage, table: Floats, cap: float, need: float) -> tuple[bool, ...] | None:
    """Return the ops that run again in least time, in runs within a cap, and drop enough bytes; None if none do."""
    own = slice(stage.first, stage.first + stage.ops)
    kinds, starts, may_start = model.kinds[own], model.starts_layer[own], model.may_start_run[own]
    kept = table[:, KEPT]
    sums, levels = np.cumsum(np.concatenate([[0.0], kept])), np.arange(len(kept))
    layer = np.arange(model.layer_kinds.start, model.layer_kinds.stop)
    quantum = choose_quantum(kept, layer, need / UNITS)
    wanted = int(np.ceil(need / quantum - 1e-9))
    tables = np.full((stage.ops, len(kept) + 1, wanted + 1), np.inf)
    tables[0, 0, 0] = 0.0
    if may_start[0]:
        tables[0, kinds[0] + 1, 0] = table[kinds[0], FORWARD]
    following, drops = np.full((stage.ops, len(kept)), -1), [0]
    for place in range(1, stage.ops):
        before, kind = kinds[place - 1], kinds[place]
        fits = (levels <= before) & (sums[before + 1] - sums[:-1] <= cap * (1 + 1e-9))
        following[place] = np.where(fits, levels, -1)
        drops.append(0 if starts[place] else int(kept[before] / quantum + 1e-9))
        append_op(
            tables[place - 1], tables[place], table[kind, FORWARD], bool(may_start[place]), bool(starts[place]),
            following[place], int(kind), drops[place], wanted,
        )  # fmt: skip
    state, units = int(tables[-1, :, wanted].argmin()), wanted
    if tables[-1, state, wanted] == np.inf:
        return None
    again = [state > 0]
    for place in range(stage.ops - 1, 0, -1):
        before = tables[place - 1]
        if state == 0:
            state = int(before[:, units].argmin())
        else:
            left = max(0, units - drops[place])
            is_fresh = state == kinds[place] + 1
            reaches = following[place] >= 0 if starts[place] else following[place] == state - 1
            joined = np.where(reaches & (is_fresh | ~starts[place]), before[1:, left], np.inf)
            alone = before[0, units] if may_start[place] and is_fresh else np.inf
            if joined.min() <= alone:
                state, units = int(joined.argmin()) + 1, left
            else:
                state = 0
        again.append(state > 0)
    return tuple(reversed(again))

"""Compiled kernels of staging problems: a dynamic program from the last stage to the first, under a cap.

Of the pipelines with equal blocks, devices, number of stages and first option, only those on the Pareto frontier of
(R, W) (`autopar.staging`) are kept.
"""

import numpy as np
from numpy.typing import NDArray

from autopar.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

REST, END = range(2)
ROUNDING = 1e-12
"""Relative rounding error of sums in different orders."""


@compiled
def insert_pareto(kept: Floats, count: int, rest: float, end: float) -> int:
    """Insert a pair into a Pareto frontier unless it is dominated; return the frontier's size, -1 if it is full."""
    for index in range(count):
        if kept[index, REST] <= rest * (1 + ROUNDING) and kept[index, END] <= end * (1 + ROUNDING):
            return count
    size = 0
    for index in range(count):
        if not (rest <= kept[index, REST] and end <= kept[index, END]):
            kept[size, REST], kept[size, END] = kept[index, REST], kept[index, END]
            size += 1
    if size == len(kept):
        return -1
    kept[size, REST], kept[size, END] = rest, end
    return size + 1


@compiled
def prefix_bounds(
    at: Ints, sizes: Ints, starts: Bools, seconds: Floats, lead: Floats, cap: float
) -> tuple[Floats, Floats]:
    """Return lower bounds on the sums of t and of t - b over stages of the first blocks and devices.

    Relaxes: levels, columns and hand-overs (the least t and t - b of each is taken). Valid when: `seconds` and `lead`
    are minima over levels. Costs: one dynamic program over blocks, devices, options and lengths.

    Args:
        at: Ranges of blocks, as in `Staging.at`.
        sizes: Devices of each option.
        starts: Devices where each option may start.
        seconds: (options, ranges) least t; infinity if infeasible.
        lead: (options, ranges) least t - b.
        cap: Cap on the seconds of the slowest stage.

    Returns:
        Two arrays of shape (blocks + 1, devices + 1).
    """
    num_blocks, longest = at.shape
    num_options, num_devices = starts.shape
    least = np.full((num_blocks + 1, num_devices + 1), np.inf)
    leads = np.full((num_blocks + 1, num_devices + 1), np.inf)
    least[0, 0] = leads[0, 0] = 0.0
    for block in range(num_blocks):
        for device in range(num_devices):
            if least[block, device] == np.inf:
                continue
            for option in range(num_options):
                after = device + sizes[option]
                if not starts[option, device] or after > num_devices:
                    continue
                for length in range(min(longest, num_blocks - block)):
                    window = at[block, length]
                    if window < 0 or seconds[option, window] > cap:
                        continue
                    stop = block + length + 1
                    least[stop, after] = min(least[stop, after], least[block, device] + seconds[option, window])
                    leads[stop, after] = min(leads[stop, after], leads[block, device] + lead[option, window])
    return least, leads


@compiled
def bottleneck(at: Ints, sizes: Ints, starts: Bools, seconds: Floats, counts: Bools) -> float:
    """Return the least seconds of the slowest stage over all routes; infinity if there is none.

    Args:
        at: Ranges of blocks, as in `Staging.at`.
        sizes: Devices of each option.
        starts: Devices where each option may start.
        seconds: (levels, options, ranges) least t; infinity if infeasible.
        counts: (levels,) whether a route may have `level + 1` stages.
    """
    num_blocks, longest = at.shape
    num_options, num_devices = starts.shape
    levels = len(seconds)
    found = np.inf
    before = np.full((num_blocks + 1, num_devices + 1), np.inf)
    before[num_blocks, num_devices] = 0.0
    for level in range(levels):
        now = np.full((num_blocks + 1, num_devices + 1), np.inf)
        for block in range(num_blocks):
            for device in range(num_devices):
                for option in range(num_options):
                    after = device + sizes[option]
                    if not starts[option, device] or after > num_devices:
                        continue
                    for length in range(min(longest, num_blocks - block)):
                        window = at[block, length]
                        if window < 0:
                            continue
                        slowest = max(before[block + length + 1, after], seconds[level, option, window])
                        now[block, device] = min(now[block, device], slowest)
        if counts[level]:
            found = min(found, now[0, 0])
        before = now
    return found


@compiled
def pareto_suffixes(
    at: Ints,
    sizes: Ints,
    starts: Bools,
    seconds: Floats,
    lead: Floats,
    slow: Floats,
    tails: Floats,
    ends: Ints,
    classes: Ints,
    ahead: Floats,
    back: Floats,
    least: Floats,
    leads: Floats,
    cap: float,
    most: float,
    room: int,
) -> tuple[Floats, Ints, bool]:
    """Return the Pareto frontiers of (R, W) of pipelines that end the chain.

    Args:
        at: Ranges of blocks, as in `Staging.at`.
        sizes: Devices of each option.
        starts: Devices where each option may start.
        seconds: t of each stage.
        lead: t - b of each stage.
        slow: Seconds lost by hiding each stage's reductions.
        tails: Seconds after each stage's last backward.
        ends: Placement of handed-over values, per option.
        classes: Class of the values handed to each block.
        ahead: Seconds of forward hand-overs.
        back: Seconds of backward hand-overs.
        least: Lower bound on the t of earlier stages, from `prefix_bounds`.
        leads: Lower bound on the t - b of earlier stages, from `prefix_bounds`.
        cap: Cap on the seconds of the slowest stage.
        most: Pipelines whose W plus the bounds of earlier stages is at least this are pruned.
        room: Capacity of each frontier.

    Returns:
        The pairs, shape (levels, blocks, devices, options, room, 2), the size of each frontier, shape (levels, blocks,
        devices, options), and whether no frontier exceeded its capacity.
    """
    num_blocks, longest = at.shape
    num_options, num_devices = starts.shape
    levels, columns = seconds.shape[0], seconds.shape[3]
    num_ends = len(ahead)
    kept = np.zeros((levels, num_blocks, num_devices, num_options, room, 2))
    number = np.zeros((levels, num_blocks, num_devices, num_options), dtype=np.int64)
    joined = np.zeros((num_blocks, num_devices, num_ends, room, 2))
    joins = np.zeros((num_blocks, num_devices, num_ends), dtype=np.int64)
    for level in range(levels):
        if level:
            joins[:] = 0
            for block in range(1, num_blocks):
                what = classes[block]
                for device in range(1, num_devices):
                    for option in range(num_options):
                        for index in range(number[level - 1, block, device, option]):
                            rest, end = kept[level - 1, block, device, option, index]
                            for sender in range(num_ends):
                                there = ahead[sender, ends[option], what, device]
                                again = back[sender, ends[option], what, device]
                                count = insert_pareto(
                                    joined[block, device, sender],
                                    joins[block, device, sender],
                                    rest + there + again,
                                    end + there,
                                )
                                if count < 0:
                                    return kept, number, False
                                joins[block, device, sender] = count
        for block in range(num_blocks):
            for device in range(num_devices):
                if least[block, device] == np.inf:
                    continue
                for option in range(num_options):
                    after = device + sizes[option]
                    if not starts[option, device] or after > num_devices:
                        continue
                    if (level == 0) != (after == num_devices):
                        continue
                    for length in range(min(longest, num_blocks - block)):
                        stop = block + length + 1
                        if (level == 0) != (stop == num_blocks):
                            continue
                        window = at[block, length]
                        if window < 0:
                            continue
                        followers = joins[stop, after, ends[option]] if level else 1
                        for column in range(columns):
                            own = seconds[level, option, window, column]
                            if own > cap:
                                continue
                            for index in range(followers):
                                rest = own + slow[level, option, window, column]
                                end = 0.0
                                if level:
                                    rest += joined[stop, after, ends[option], index, REST]
                                    end = lead[level, option, window, column]
                                    end += joined[stop, after, ends[option], index, END]
                                end = max(end, rest + tails[level, option, window, column])
                                if max(least[block, device] + rest, leads[block, device] + end) >= most:
                                    continue
                                count = insert_pareto(
                                    kept[level, block, device, option],
                                    number[level, block, device, option],
                                    rest,
                                    end,
                                )
                                if count < 0:
                                    return kept, number, False
                                number[level, block, device, option] = count
    return kept, number, True


@compiled
def surviving_stages(
    at: Ints,
    sizes: Ints,
    starts: Bools,
    seconds: Floats,
    lead: Floats,
    slow: Floats,
    counts: Bools,
    least: Floats,
    leads: Floats,
    rest: Floats,
    end: Floats,
    lowest: float,
    follow: float,
    most: float,
    one_each: bool,
) -> Ints:
    """Return the stages that a route of at most `most` seconds may have, shape (stages, 6).

    A row holds level, first block, block after the last, first device, option and column.

    Args:
        at: Ranges of blocks, as in `Staging.at`.
        sizes: Devices of each option.
        starts: Devices where each option may start.
        seconds: (levels, options, ranges, columns) t of stages.
        lead: t - b of each stage.
        slow: Seconds lost by hiding each stage's reductions.
        counts: (levels,) whether a route may have `level + 1` stages.
        least: Lower bound on the t of earlier stages, from `prefix_bounds`.
        leads: Lower bound on the t - b of earlier stages, from `prefix_bounds`.
        rest: (levels, blocks, devices) lower bound on R of later stages.
        end: (levels, blocks, devices) lower bound on W of later stages.
        lowest: Least seconds of the slowest stage of any route.
        follow: Factor on the slowest stage in the objective.
        most: Seconds, without the constant part of a step.
        one_each: Whether one stage per option is enough.
    """
    num_blocks, longest = at.shape
    levels, num_options, _, num_columns = seconds.shape
    num_devices = starts.shape[1]
    found, number = np.empty((1024, 6), dtype=np.int64), 0
    for option in range(num_options):
        enough = False
        for level in range(levels):
            for device in range(num_devices):
                after = device + sizes[option]
                if (
                    enough
                    or not starts[option, device]
                    or after > num_devices
                    or (level == 0) != (after == num_devices)
                ):
                    continue
                for start in range(num_blocks):
                    if (start == 0) != (device == 0) or (start == 0 and not counts[level]):
                        continue
                    if enough or least[start, device] == np.inf:
                        continue
                    for length in range(min(longest, num_blocks - start)):
                        window, stop = at[start, length], start + length + 1
                        if enough or window < 0 or (level == 0) != (stop == num_blocks):
                            continue
                        rests = rest[level - 1, stop, after] if level else 0.0
                        ends = end[level - 1, stop, after] if level else 0.0
                        for column in range(num_columns):
                            own = seconds[level, option, window, column]
                            if own == np.inf:
                                continue
                            early = least[start, device] + own + slow[level, option, window, column] + rests
                            late = leads[start, device] + lead[level, option, window, column] + ends
                            if follow * max(own, lowest) + max(early, late) > most:
                                continue
                            if number == len(found):
                                more = np.empty((2 * number, 6), dtype=np.int64)
                                more[:number] = found
                                found = more
                            found[number, 0], found[number, 1], found[number, 2] = level, start, stop
                            found[number, 3], found[number, 4], found[number, 5] = device, option, column
                            number += 1
                            enough = one_each
                            if enough:
                                break
    return found[:number]

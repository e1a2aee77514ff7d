"""The hot loops of staging problems, compiled: pipelines from their last stage to the first, under a cap.

Of the pipelines that end with the same blocks and devices, as many stages and the same first option, those are kept
that no other one beats in both R and W (`autopar.staging`).
"""

import numpy as np
from numpy.typing import NDArray

from autopar.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

REST, END = range(2)
ROUNDING = 1e-12
"""Sums of the same numbers in another order differ by rounding: relative."""


@compiled
def insert(kept: Floats, count: int, rest: float, end: float) -> int:
    """Put a pair among those kept unless one of them beats it; return how many there are, -1 if there is no room."""
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
def reach(at: Ints, sizes: Ints, starts: Bools, seconds: Floats, lead: Floats, cap: float) -> tuple[Floats, Floats]:
    """Return the least sums of t and of t - b of stages that take the first blocks and devices, (blocks, devices) + 1.

    Args:
        at: Ranges, as in `Staging.at`.
        sizes: Devices of options.
        starts: Where they may start.
        seconds: (options, ranges) least t; infinity where nothing fits.
        lead: (options, ranges) least t - b.
        cap: Seconds of the slowest stage.
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
def narrowest(at: Ints, sizes: Ints, starts: Bools, seconds: Floats, counts: Bools) -> float:
    """Return the least seconds of the slowest stage of any route; infinity if there is none.

    Args:
        at: Ranges, as in `Staging.at`.
        sizes: Devices of options.
        starts: Where they may start.
        seconds: (levels, options, ranges) least t; infinity where nothing fits.
        counts: (levels,) whether a route may have one stage more than the number.
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
def suffixes(
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
    """Return the pairs (R, W) of pipelines that end the chain.

    Args:
        at: Ranges, as in `Staging.at`.
        sizes: Devices of options.
        starts: Where they may start.
        seconds: t of stages.
        lead: Their t - b.
        slow: What hiding their reductions costs.
        tails: What follows their last backward.
        ends: How options hold what is handed over.
        classes: What is handed to each block.
        ahead: Seconds of handing on.
        back: Seconds of handing back.
        least: What earlier stages take at least, from `reach`.
        leads: The same of t - b.
        cap: Seconds of the slowest stage.
        most: Pipelines whose W comes to at least this with what earlier stages take interest nobody.
        room: Pairs kept of each kind.

    Returns:
        (levels, blocks, devices, options, room, 2) pairs, their (levels, blocks, devices, options) number, and whether
        there was room for all.
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
                                count = insert(
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
                                count = insert(
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
def surviving(
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
    """Return the stages that a route of at most so many seconds can have, (stages, 6).

    Each is a level, the blocks from one to another, the first device, an option and a column.

    Args:
        at: Ranges, as in `Staging.at`.
        sizes: Devices of options.
        starts: Where they may start.
        seconds: (levels, options, ranges, columns) t of stages.
        lead: Their t - b.
        slow: What hiding their reductions costs.
        counts: (levels,) whether a route may have one stage more than the number.
        least: What earlier stages take at least, from `reach`.
        leads: The same of t - b.
        rest: (levels, blocks, devices) what later stages take at least.
        end: The same of when they end.
        lowest: Least seconds of the slowest stage of any route.
        follow: How often the slowest stage counts.
        most: Seconds, but for those of every step.
        one_each: Whether one stage of each option is enough.
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

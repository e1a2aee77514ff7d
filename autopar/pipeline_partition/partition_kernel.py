"""Compiled kernels of partitioning: Pareto frontiers of mixtures per window, and dynamic programs over stages."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from autopar.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

AGAIN, GATHERS, KEPT, RUNNING, LATE, FORTH, TRANSIT, HOSTED = range(8)
"""Columns of a mixture: seconds of recompute and waiting for the host, seconds of its gathers, bytes one microbatch
leaves behind, fullest moment of a pass in bytes, seconds by which reductions of first blocks outlast the backward, the
part of the first column that delays forwards, bytes in transit to and from the host, bytes left there."""

COLUMNS = 8
"""Number of columns."""


def _thin_frontier_python(new: Floats, keep: Ints, count: int, most: int) -> int:
    """Thin a frontier to one mixture per equal interval of seconds: the one nearest to the lower convex hull of bytes.

    The hull of a Minkowski sum is the sum of the hulls, so a mixture far above the hull stays so in longer windows.

    Args:
        new: (mixtures, 8) mixtures.
        keep: Indices of mixtures by ascending seconds; the kept ones are moved to the front.
        count: Number of indices.
        most: Most mixtures to keep.

    Returns:
        Number of kept mixtures.
    """
    hull = np.empty(count, dtype=np.int64)
    size = 0
    for place in range(count):
        third = keep[place]
        while size >= 2:
            first, second = keep[hull[size - 2]], keep[hull[size - 1]]
            run = (new[second, AGAIN] - new[first, AGAIN]) * (new[third, KEPT] - new[first, KEPT])
            rise = (new[second, KEPT] - new[first, KEPT]) * (new[third, AGAIN] - new[first, AGAIN])
            if run > rise:
                break
            size -= 1
        hull[size] = place
        size += 1
    above = np.zeros(count)
    reach = new[keep[0], KEPT] - new[keep[count - 1], KEPT]
    for edge in range(size - 1):
        first, second = keep[hull[edge]], keep[hull[edge + 1]]
        width = new[second, AGAIN] - new[first, AGAIN]
        for place in range(hull[edge], hull[edge + 1] + 1):
            part = (new[keep[place], AGAIN] - new[first, AGAIN]) / width if width > 0 else 0.0
            line = new[first, KEPT] + part * (new[second, KEPT] - new[first, KEPT])
            above[place] = max(0.0, new[keep[place], KEPT] - line) / reach if reach > 0 else 0.0
    lowest = new[keep[0], AGAIN]
    width = new[keep[count - 1], AGAIN] - lowest
    size = 0
    last = -1
    for place in range(count):
        part = int((new[keep[place], AGAIN] - lowest) / width * (most - 1)) if width > 0 else 0
        if part > last:
            best, last = place, part
            size += 1
        elif above[place] >= above[best]:
            continue
        else:
            best = place
        hull[size - 1] = keep[best]
    for place in range(size):
        keep[place] = hull[place]
    return size


_thin_frontier = compiled(_thin_frontier_python)


def _sort_mixtures_python(
    new: Floats, origin: Ints, size: int, flavours: int, ends: Ints, line: Ints, order: Ints
) -> None:
    """Sort mixtures by seconds, ties by index, with a merge: mixtures of one last flavour are sorted already.

    Args:
        new: (mixtures, 8) mixtures.
        origin: (mixtures, 2) parent mixture, ascending, and flavour of the last block.
        size: Number of mixtures.
        flavours: Number of flavours.
        ends: (flavours,) work array.
        line: (flavours, most) work array.
        order: (mixtures,) output: the sorted indices.
    """
    ends[:] = 0
    for index in range(size):
        own = origin[index, 1]
        line[own, ends[own]] = index
        ends[own] += 1
    heads = np.zeros(flavours, dtype=np.int64)
    for turn in range(size):
        first = -1
        for own in range(flavours):
            if heads[own] < ends[own]:
                index = line[own, heads[own]]
                if (
                    first < 0
                    or new[index, AGAIN] < new[first, AGAIN]
                    or (new[index, AGAIN] == new[first, AGAIN] and index < first)
                ):
                    first = index
        order[turn] = first
        heads[origin[first, 1]] += 1


_sort_mixtures = compiled(_sort_mixtures_python)


def _frontiers(
    parent: Ints,
    spent: Floats,
    due: Floats,
    again: Floats,
    gathers: Floats,
    step: Ints,
    kept: Floats,
    running: Floats,
    closed: Floats,
    late: Floats,
    after: Ints,
    covers: Ints,
    forth: Floats,
    transit: Floats,
    hosted: Floats,
    room: Floats,
    host_room: float,
    waiting: int,
    most: int,
) -> tuple[Floats, Ints, Ints, Ints]:
    """Return the Pareto frontier of the mixtures of every window in seconds and bytes.

    Args:
        parent: Window without the last block, -1 for windows of one block; its index is smaller.
        spent: Backward seconds of all blocks of a window but the last.
        due: Seconds of the reductions of all blocks of a window.
        again: (windows, flavours) seconds the last block recomputes or waits for copies from and to the host.
        gathers: (windows, flavours) seconds of gathers in these.
        step: (windows,) row of the last block in the arrays (steps, ...).
        kept: (steps, states, flavours) bytes it keeps of a microbatch, by the state of the window without it.
        running: (steps, states, flavours) fullest moment of its passes, on top of what earlier blocks keep.
        closed: (windows, flavours) infinity where the last block must not have a flavour, else 0.
        late: (steps,) bytes it delays to its weight pass.
        after: (steps, states, flavours) state of the window.
        covers: (steps, states, states) whether the first state keeps all values that the second keeps.
        forth: (windows, flavours) part of `again` in the forward.
        transit: (windows, flavours) bytes in transit to and from the host during the last block's passes.
        hosted: (windows, flavours) bytes of the last block on the host.
        room: (windows,) bytes available for activations.
        host_room: Bytes available in host memory; infinity if everything fits.
        waiting: Least number of microbatches that wait while a pass runs.
        most: Most mixtures per window.

    Returns:
        (windows, largest number, 8) mixtures, their number, each mixture's parent mixture, and the flavour of the last
        block.
    """
    count, flavours = again.shape
    found = np.zeros((count, most, COLUMNS))
    counts_host = host_room < np.inf
    number = np.zeros(count, dtype=np.int64)
    source = np.zeros((count, most), dtype=np.int64)
    flavour = np.zeros((count, most), dtype=np.int64)
    states = np.zeros((count, most), dtype=np.int64)
    state = np.zeros(most * flavours, dtype=np.int64)
    new = np.empty((most * flavours, COLUMNS))
    origin = np.empty((most * flavours, 2), dtype=np.int64)
    order = np.empty(most * flavours, dtype=np.int64)
    keep = np.empty(most * flavours, dtype=np.int64)
    ends = np.empty(flavours, dtype=np.int64)
    line = np.empty((flavours, most), dtype=np.int64)
    fewest = np.empty(covers.shape[1])
    for window in range(count):
        before, row = parent[window], step[window]
        olds = number[before] if before >= 0 else 1
        size = 0
        for old in range(olds):
            for own in range(flavours):
                own_state = 0
                for column in range(COLUMNS):
                    new[size, column] = found[before, old, column] if before >= 0 else 0.0
                if before >= 0:
                    own_state = states[before, old]
                fullest = new[size, KEPT] + running[row, own_state, own] + closed[window, own]
                new[size, RUNNING] = max(new[size, RUNNING] + late[row], fullest)
                new[size, KEPT] += kept[row, own_state, own]
                state[size] = after[row, own_state, own]
                backward = spent[window] + new[size, AGAIN] - new[size, FORTH]
                new[size, LATE] = max(new[size, LATE], due[window] - backward)
                new[size, AGAIN] += again[window, own]
                new[size, GATHERS] += gathers[window, own]
                new[size, FORTH] += forth[window, own]
                new[size, TRANSIT] = max(new[size, TRANSIT], transit[window, own])
                new[size, HOSTED] += hosted[window, own]
                on_device = waiting * new[size, KEPT] + new[size, RUNNING] + new[size, TRANSIT]
                if on_device <= room[window] and (waiting + 1) * new[size, HOSTED] <= host_room:
                    origin[size, 0], origin[size, 1] = old, own
                    size += 1
        _sort_mixtures(new, origin, size, flavours, ends, line, order)
        fewest[:] = np.inf  # least bytes kept so far, by state
        for turn in range(size):
            index = order[turn]
            least = np.inf
            for one in range(len(fewest)):
                if fewest[one] < least and covers[row, one, state[index]]:
                    least = fewest[one]
            beaten = False
            if least <= new[index, KEPT] * (1 + 1e-9):
                for place in range(number[window] - 1, -1, -1):  # a dominating mixture is usually near
                    other = keep[place]
                    if (  # sums in different orders differ by rounding
                        covers[row, state[other], state[index]]
                        and new[other, AGAIN] <= new[index, AGAIN] * (1 + 1e-9)
                        and new[other, KEPT] <= new[index, KEPT] * (1 + 1e-9)
                        and new[other, RUNNING] <= new[index, RUNNING] * (1 + 1e-9)
                        and new[other, FORTH] <= new[index, FORTH] * (1 + 1e-9)
                        and new[other, TRANSIT] <= new[index, TRANSIT]
                        and (not counts_host or new[other, HOSTED] <= new[index, HOSTED] * (1 + 1e-9))
                    ):
                        beaten = True
                        break
            if not beaten:
                keep[number[window]] = index
                number[window] += 1
                fewest[state[index]] = min(fewest[state[index]], new[index, KEPT])
        if number[window] > most:
            number[window] = _thin_frontier(new, keep, number[window], most)
        for place in range(number[window]):
            index = keep[place]
            for column in range(COLUMNS):
                found[window, place, column] = new[index, column]
            source[window, place], flavour[window, place] = origin[index, 0], origin[index, 1]
            states[window, place] = state[index]
    widest = max(1, number.max())
    return found[:, :widest], number, source[:, :widest], flavour[:, :widest]


def _uniform(
    parent: Ints,
    due: Floats,
    again: Floats,
    gathers: Floats,
    kept: Floats,
    running: Floats,
    late: Floats,
    forth: Floats,
    transit: Floats,
    hosted: Floats,
) -> Floats:
    """Return the mixtures of one flavour of every window, (windows, flavours, 8).

    Args:
        parent: As in `_frontiers`.
        due: Seconds of a window's reductions not hidden by the backward of all blocks but the last.
        again: As in `_frontiers`.
        gathers: As in `_frontiers`.
        kept: (windows, flavours) bytes the last block keeps of a microbatch.
        running: (windows, flavours) fullest moment of its passes, on top of what earlier blocks keep.
        late: (windows, flavours) bytes it delays to its weight pass.
        forth: As in `_frontiers`.
        transit: As in `_frontiers`.
        hosted: As in `_frontiers`.
    """
    count, flavours = again.shape
    rows = np.zeros((count, flavours, COLUMNS))
    for window in range(count):
        for own in range(flavours):
            row = rows[window, own]
            if parent[window] >= 0:
                for column in range(COLUMNS):
                    row[column] = rows[parent[window], own, column]
            row[RUNNING] = max(row[RUNNING] + late[window, own], row[KEPT] + running[window, own])
            row[KEPT] += kept[window, own]
            row[LATE] = max(row[LATE], due[window] - (row[AGAIN] - row[FORTH]))
            row[AGAIN] += again[window, own]
            row[GATHERS] += gathers[window, own]
            row[FORTH] += forth[window, own]
            row[TRANSIT] = max(row[TRANSIT], transit[window, own])
            row[HOSTED] += hosted[window, own]
    return rows


def _fullest(parent: Ints, gathered: Floats, reducing: Floats, update: Floats) -> tuple[Floats, Floats, Floats]:
    """Return per window the maxima over blocks: gathered bytes of two neighbours, and of reductions and updates.

    Args:
        parent: As in `_frontiers`.
        gathered: (windows,) gathered bytes of the last block.
        reducing: (windows,) bytes of its gradients in reduction.
        update: (windows,) bytes of its update.
    """
    pairs, most_reducing, most_update = gathered.copy(), reducing.copy(), update.copy()
    for window in range(len(parent)):
        before = parent[window]
        if before >= 0:
            pairs[window] = max(pairs[before], gathered[window] + gathered[before])
            most_reducing[window] = max(reducing[window], most_reducing[before])
            most_update[window] = max(update[window], most_update[before])
    return pairs, most_reducing, most_update


def _bottleneck(at: Ints, seconds: Floats) -> float:
    """Return the least seconds of the slowest stage over all cuts (bottleneck); infinity if none is feasible.

    Args:
        at: Windows of ranges, as in `Windows.at`.
        seconds: (stages, windows) seconds; infinity if infeasible.
    """
    num_stages, (num_blocks, longest) = len(seconds), at.shape
    best = np.full(num_blocks + 1, np.inf)
    best[0] = 0.0
    for stage in range(num_stages):
        after = np.full(num_blocks + 1, np.inf)
        for start in range(num_blocks):
            if best[start] == np.inf:
                continue
            for length in range(min(longest, num_blocks - start)):
                window = at[start, length]
                if window < 0:
                    continue
                value = max(best[start], seconds[stage, window])
                after[start + length + 1] = min(after[start + length + 1], value)
        best = after
    return float(best[num_blocks])


def _max_blocks_behind_python(lengths: Ints, seconds: Floats, cap: float) -> Ints:
    """Return the most blocks the stages after each stage can hold; arguments as in `_earliest_end`."""
    num_stages, num_windows, options = seconds.shape
    behind = np.zeros(num_stages, dtype=np.int64)
    for stage in range(num_stages - 1, 0, -1):
        most = 0
        for window in range(num_windows):
            if lengths[window] > most:
                for option in range(options):
                    if seconds[stage, window, option] <= cap and seconds[stage, window, option] < np.inf:
                        most = lengths[window]
                        break
        behind[stage - 1] = behind[stage] + most
    return behind


_max_blocks_behind = compiled(_max_blocks_behind_python)


def _earliest_end(
    at: Ints, lengths: Ints, seconds: Floats, tails: Floats, slow: Floats, before: Floats, cap: float
) -> tuple[float, Ints, Ints]:
    """Return the earliest end of the last stage under a cap on each stage, and the cut that reaches it.

    Args:
        at: Windows of ranges, as in `Windows.at`.
        lengths: (windows,) number of blocks.
        seconds: (stages, windows, options) seconds; infinity if infeasible.
        tails: (stages, windows, options) seconds after the last backward.
        slow: (stages, windows, options) seconds lost by hiding those.
        before: (stages, blocks) earliest end of the last backward of a stage from a block on, its own time excluded.
        cap: Seconds of the slowest stage.

    Returns:
        The end, infinity if there is none; per stage the block after its last, and its option.
    """
    num_stages, _, options = seconds.shape
    num_blocks, longest = at.shape
    end = np.full((num_stages + 1, num_blocks + 1), np.inf)
    first = np.zeros((num_stages + 1, num_blocks + 1), dtype=np.int64)
    taken = np.zeros((num_stages + 1, num_blocks + 1), dtype=np.int64)
    end[0, 0] = 0.0
    rest = _max_blocks_behind(lengths, seconds, cap)
    for stage in range(num_stages):
        for start in range(num_blocks):
            if end[stage, start] == np.inf:
                continue
            fewest = num_blocks - rest[stage] - start  # fewer blocks would leave too many for the later stages
            for length in range(max(0, fewest - 1), min(longest, num_blocks - start)):
                window = at[start, length]
                if window < 0:
                    continue
                stop = start + length + 1
                for option in range(options):
                    if seconds[stage, window, option] > cap:
                        continue
                    value = max(end[stage, start], before[stage, start] + tails[stage, window, option])
                    value += seconds[stage, window, option] + slow[stage, window, option]
                    if value < end[stage + 1, stop]:
                        end[stage + 1, stop], first[stage + 1, stop] = value, start
                        taken[stage + 1, stop] = option
    stops, choices = np.zeros(num_stages, dtype=np.int64), np.zeros(num_stages, dtype=np.int64)
    stop = num_blocks
    for stage in range(num_stages, 0, -1):
        stops[stage - 1], choices[stage - 1] = stop, taken[stage, stop]
        stop = first[stage, stop]
    return float(end[num_stages, num_blocks]), stops, choices


def _chain_bottleneck(sums: Floats, num_stages: int) -> float:
    """Return the least seconds of the slowest stage (bottleneck), given the (blocks + 1,) prefix sums of the blocks."""
    num_blocks = len(sums) - 1
    best = np.full(num_blocks + 1, np.inf)
    best[0] = 0.0
    for _ in range(num_stages):
        after = np.full(num_blocks + 1, np.inf)
        for stop in range(1, num_blocks + 1):
            for start in range(stop - 1, -1, -1):
                span = sums[stop] - sums[start]
                if span >= after[stop]:
                    break
                after[stop] = min(after[stop], max(best[start], span))
        best = after
    return float(best[num_blocks])


def _stage_end_python(sums: Floats, start: int, cap: float, after: int) -> int:
    """Return the largest end of a stage within `cap` that leaves one part to each of the `after` later stages."""
    reach = np.searchsorted(sums, sums[start] + cap * (1 + 1e-9), side="right") - 1
    return int(min(reach, len(sums) - 1 - after))


_stage_end = compiled(_stage_end_python)


def _runs(sums: Floats, num_stages: int, firsts: Ints, large: float, small: float) -> Ints:
    """Return the stage ends of cuts with the fewest larger stages, in one run.

    Args:
        sums: (parts + 1,) prefix sums of the seconds of indivisible parts.
        num_stages: Number of stages.
        firsts: (cuts,) first larger stage of each cut.
        large: Cap on a larger stage, in seconds.
        small: Cap on any other stage of more than one part, in seconds.

    Returns:
        (cuts, stages) number of parts before the end of each stage; all 0 if there is no such cut.
    """
    parts = len(sums) - 1
    found = np.zeros((len(firsts), num_stages), dtype=np.int64)
    ends = np.zeros(num_stages, dtype=np.int64)
    for number in range(len(firsts)):
        low, high = 0, num_stages - firsts[number]  # length of the run, by bisection
        while low <= high:
            count, at = (low + high) // 2, 0
            for stage in range(num_stages):
                cap = large if firsts[number] <= stage < firsts[number] + count else small
                at = max(at + 1, _stage_end(sums, at, cap, num_stages - 1 - stage))
                ends[stage] = at
            if at == parts:
                found[number], high = ends, count - 1
            else:
                low = count + 1
    return found


def _even_waves(sums: Floats, caps: Floats, bends: Floats, num_groups: int, small_first: bool) -> Ints:
    """Return the stage ends of the cut that minimises the sum over chunks c of T_c + q_c T_c^2, T_c its slowest stage.

    Stages are filled greedily up to their chunk's cap, so the last ones may be small.

    Args:
        sums: (parts + 1,) prefix sums of the seconds of indivisible parts.
        caps: Caps on a stage's seconds, ascending; each chunk has one.
        bends: (chunks,) the q_c.
        num_groups: Stages of each chunk.
        small_first: Whether earlier chunks are the smaller ones among equal cuts; else the larger ones.

    Returns:
        (stages,) number of parts before each stage's end, the last included; empty if there is no such cut.
    """
    parts, num_chunks = len(sums) - 1, len(bends)
    stages = num_groups * num_chunks
    best = np.full((num_chunks + 1, parts + 1), np.inf)
    source = np.zeros((num_chunks + 1, parts + 1), dtype=np.int64)
    number = np.zeros((num_chunks + 1, parts + 1), dtype=np.int64)
    best[0, 0] = 0.0
    for chunk in range(num_chunks):
        for start in range(parts):
            if not best[chunk, start] < np.inf:
                continue
            for cap in range(len(caps)):
                at = start
                for stage in range(chunk * num_groups, (chunk + 1) * num_groups):
                    end = _stage_end(sums, at, caps[cap], stages - 1 - stage)
                    if end <= at:
                        at = -1
                        break
                    at = end
                if at < 0:
                    continue
                value = best[chunk, start] + caps[cap] * (1 + bends[chunk] * caps[cap])
                known = best[chunk + 1, at]
                alike = abs(value - known) <= 1e-9 * value
                earlier = caps[number[chunk + 1, at]] > caps[cap]  # a smaller chunk here means larger earlier chunks
                if (not alike and value < known) or (alike and earlier != small_first):
                    best[chunk + 1, at], source[chunk + 1, at], number[chunk + 1, at] = value, start, cap
    if not best[num_chunks, parts] < np.inf:
        return np.zeros(0, dtype=np.int64)
    ends = np.zeros(stages, dtype=np.int64)
    at = parts
    for chunk in range(num_chunks - 1, -1, -1):
        start, cap = source[chunk + 1, at], number[chunk + 1, at]
        at = start
        for stage in range(chunk * num_groups, (chunk + 1) * num_groups):
            at = ends[stage] = _stage_end(sums, at, caps[cap], stages - 1 - stage)
        at = start
    return ends


frontiers: Callable[..., tuple[Floats, Ints, Ints, Ints]] = compiled(_frontiers)
uniform: Callable[..., Floats] = compiled(_uniform)
fullest: Callable[..., tuple[Floats, Floats, Floats]] = compiled(_fullest)
bottleneck: Callable[..., float] = compiled(_bottleneck)
earliest_end: Callable[..., tuple[float, Ints, Ints]] = compiled(_earliest_end)
chain_bottleneck: Callable[..., float] = compiled(_chain_bottleneck)
even_waves: Callable[..., Ints] = compiled(_even_waves)
runs: Callable[..., Ints] = compiled(_runs)

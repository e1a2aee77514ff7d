"""The hot loops of cuts, compiled: frontiers of windows, and dynamic programs over stages."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from autopar.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

AGAIN, GATHERS, KEPT, RUNNING, LATE, FORTH, TRANSIT, HOSTED = range(8)
"""Columns of a mixture: seconds of what runs again or waits for the host, seconds of its gathers, bytes one microbatch
leaves behind, fullest moment of a pass in bytes, seconds that reductions of first blocks outlast the backward; of the
first what forwards wait for, bytes on their way to and from the host, and bytes one microbatch leaves there."""

COLUMNS = 8
"""How many there are."""


def _thin_out(new: Floats, keep: Ints, count: int, most: int) -> int:
    """Keep one mixture per equal part of the seconds: the one nearest to the lower hull of bytes over seconds.

    The hull of sums is the sum of hulls: what is far from it stays behind, whatever follows.

    Args:
        new: (mixtures, 8) mixtures.
        keep: Indices of mixtures in the order of their seconds; those that are kept come first.
        count: How many there are.
        most: How many to keep at most.

    Returns:
        How many are kept.
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


_thin = compiled(_thin_out)


def _in_order(new: Floats, origin: Ints, size: int, flavours: int, ends: Ints, line: Ints, order: Ints) -> None:
    """Write the mixtures in the order of their seconds, and of their numbers where these are equal.

    Those of one flavour of the last block are in order already, as those they come from are.

    Args:
        new: (mixtures, 8) mixtures.
        origin: (mixtures, 2) the mixture each comes from, ascending, and its flavour.
        size: How many there are.
        flavours: How many flavours there are.
        ends: (flavours,) room for their numbers of mixtures.
        line: (flavours, most) room for their mixtures.
        order: (mixtures,) written.
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


_in_turn = compiled(_in_order)


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
    """Return the mixtures of every window that no other one beats in seconds and bytes.

    Args:
        parent: Of each window the one without its last block, -1 if that is all there is; it comes earlier.
        spent: Backward seconds of the blocks of a window but the last.
        due: Seconds of the reductions of its blocks, the last one included.
        again: (windows, flavours) seconds that the last block runs again, or waits for copies from and to the host.
        gathers: The same of gathers.
        step: (windows,) which row of the next arrays is about its last block.
        kept: (steps, states, flavours) bytes it keeps of a microbatch, by the state of the window without it.
        running: The same of the fullest moment of its passes, on top of what earlier blocks keep.
        closed: (windows, flavours) bytes that are too many for any device where it must not have a flavour, else 0.
        late: (steps,) bytes it puts off to its weight pass.
        after: (steps, states, flavours) state of the window.
        covers: (steps, states, states) whether all that is kept in the second state is kept in the first.
        forth: (windows, flavours) seconds of `again` that are of the forward.
        transit: (windows, flavours) bytes on their way to and from the host where the last block's are.
        hosted: (windows, flavours) bytes of the last block that lie on the host.
        room: (windows,) bytes there are for activations.
        host_room: The same in host memory; infinite if all can lie there.
        waiting: Microbatches that at least wait while a pass runs.
        most: Mixtures kept per window.

    Returns:
        (windows, as many as any has, 8) mixtures, their number, the mixture of the parent each comes from, and the
        flavour of the last block.
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
        _in_turn(new, origin, size, flavours, ends, line, order)
        fewest[:] = np.inf  # bytes of what is kept, by state
        for turn in range(size):
            index = order[turn]
            least = np.inf
            for one in range(len(fewest)):
                if fewest[one] < least and covers[row, one, state[index]]:
                    least = fewest[one]
            beaten = False
            if least <= new[index, KEPT] * (1 + 1e-9):
                for place in range(number[window] - 1, -1, -1):  # what beats it is mostly near
                    other = keep[place]
                    if (  # sums of the same numbers in another order differ by rounding
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
            number[window] = _thin(new, keep, number[window], most)
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
        parent: As of `_frontiers`.
        due: Seconds of the reductions of its blocks that the backward of those but the last one leaves.
        again: As of `_frontiers`, like those that follow.
        gathers: The same.
        kept: (windows, flavours) bytes the last block keeps of a microbatch.
        running: The same of the fullest moment of its passes, on top of what earlier blocks keep.
        late: The same of what it puts off to its weight pass.
        forth: As of `_frontiers`.
        transit: The same.
        hosted: The same.
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
    """Return what the blocks of every window take at most: two neighbours' gathered bytes, and one's of the others.

    Args:
        parent: As of `_frontiers`.
        gathered: (windows,) gathered bytes of the last block.
        reducing: The same of gradients under way.
        update: The same of the update.
    """
    pairs, most_reducing, most_update = gathered.copy(), reducing.copy(), update.copy()
    for window in range(len(parent)):
        before = parent[window]
        if before >= 0:
            pairs[window] = max(pairs[before], gathered[window] + gathered[before])
            most_reducing[window] = max(reducing[window], most_reducing[before])
            most_update[window] = max(update[window], most_update[before])
    return pairs, most_reducing, most_update


def _slowest(at: Ints, seconds: Floats) -> float:
    """Return the least seconds of the slowest stage over all cuts; infinity if none fits.

    Args:
        at: Windows of ranges, as in `Windows.at`.
        seconds: (stages, windows) seconds; infinity where nothing fits.
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


def _held_behind(lengths: Ints, seconds: Floats, cap: float) -> Ints:
    """Return how many blocks the stages behind each one hold at most; arguments as of `_earliest_end`."""
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


_most_behind = compiled(_held_behind)


def _earliest_end(
    at: Ints, lengths: Ints, seconds: Floats, tails: Floats, slow: Floats, before: Floats, cap: float
) -> tuple[float, Ints, Ints]:
    """Return the earliest end of the last stage with no stage slower than `cap`, and the cuts that reach it.

    Args:
        at: Windows of ranges, as in `Windows.at`.
        lengths: (windows,) blocks of each.
        seconds: (stages, windows, options) seconds; infinity where nothing fits.
        tails: The same of what follows the last backward.
        slow: The same of what hiding that costs.
        before: (stages, blocks) when the last backward of a stage that starts with a block could end if it took none.
        cap: Seconds of the slowest stage.

    Returns:
        Seconds, infinity if there is none; per stage its last block and one, and the option it takes.
    """
    num_stages, _, options = seconds.shape
    num_blocks, longest = at.shape
    end = np.full((num_stages + 1, num_blocks + 1), np.inf)
    first = np.zeros((num_stages + 1, num_blocks + 1), dtype=np.int64)
    taken = np.zeros((num_stages + 1, num_blocks + 1), dtype=np.int64)
    end[0, 0] = 0.0
    rest = _most_behind(lengths, seconds, cap)
    for stage in range(num_stages):
        for start in range(num_blocks):
            if end[stage, start] == np.inf:
                continue
            fewest = num_blocks - rest[stage] - start  # or the stages behind cannot hold what is left
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


def _evenest(sums: Floats, num_stages: int) -> float:
    """Return the least seconds of the slowest stage of blocks, given their (blocks + 1,) running sum."""
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


def _stage_end(sums: Floats, start: int, cap: float, after: int) -> int:
    """Return where a stage from a part on ends that takes as much as it may and leaves one to each of those after."""
    reach = np.searchsorted(sums, sums[start] + cap * (1 + 1e-9), side="right") - 1
    return int(min(reach, len(sums) - 1 - after))


_reaching = compiled(_stage_end)


def _runs(sums: Floats, num_stages: int, firsts: Ints, large: float, small: float) -> Ints:
    """Return where the stages of cuts end in which as few as can be are larger, one after the other.

    Args:
        sums: (parts + 1,) running sum of the seconds of what is not cut.
        num_stages: Stages.
        firsts: (cuts,) the first larger stage of each cut.
        large: Seconds that a larger stage may take.
        small: Seconds that another one may take, where a part is not more.

    Returns:
        (cuts, stages) parts up to the end of each stage; all 0 if there is no such cut.
    """
    parts = len(sums) - 1
    found = np.zeros((len(firsts), num_stages), dtype=np.int64)
    ends = np.zeros(num_stages, dtype=np.int64)
    for number in range(len(firsts)):
        low, high = 0, num_stages - firsts[number]  # more of them leave no more parts over
        while low <= high:
            count, at = (low + high) // 2, 0
            for stage in range(num_stages):
                cap = large if firsts[number] <= stage < firsts[number] + count else small
                at = max(at + 1, _reaching(sums, at, cap, num_stages - 1 - stage))
                ends[stage] = at
            if at == parts:
                found[number], high = ends, count - 1
            else:
                low = count + 1
    return found


def _even_waves(sums: Floats, caps: Floats, bends: Floats, num_groups: int, small_first: bool) -> Ints:
    """Return where the stages of a cut end whose slowest stages T_c, one of each chunk, have the least T_c + q_c T_c^2.

    Every stage takes as much as it may, so that the last ones may have little.

    Args:
        sums: (parts + 1,) running sum of the seconds of what is not cut.
        caps: Seconds that a stage may take, ascending: those of a chunk are below one of these.
        bends: (chunks,) the q_c.
        num_groups: Stages of each chunk.
        small_first: Whether, of equal cuts, earlier chunks are the smaller ones; else they are the larger ones.

    Returns:
        (stages,) parts up to the end of each, the last one included; empty if there is no such cut.
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
                    end = _reaching(sums, at, caps[cap], stages - 1 - stage)
                    if end <= at:
                        at = -1
                        break
                    at = end
                if at < 0:
                    continue
                value = best[chunk, start] + caps[cap] * (1 + bends[chunk] * caps[cap])
                known = best[chunk + 1, at]
                alike = abs(value - known) <= 1e-9 * value
                earlier = caps[number[chunk + 1, at]] > caps[cap]  # a smaller chunk here is a larger one before
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
            at = ends[stage] = _reaching(sums, at, caps[cap], stages - 1 - stage)
        at = start
    return ends


frontiers: Callable[..., tuple[Floats, Ints, Ints, Ints]] = compiled(_frontiers)
uniform: Callable[..., Floats] = compiled(_uniform)
fullest: Callable[..., tuple[Floats, Floats, Floats]] = compiled(_fullest)
slowest: Callable[..., float] = compiled(_slowest)
earliest_end: Callable[..., tuple[float, Ints, Ints]] = compiled(_earliest_end)
evenest: Callable[..., float] = compiled(_evenest)
even_waves: Callable[..., Ints] = compiled(_even_waves)
runs: Callable[..., Ints] = compiled(_runs)

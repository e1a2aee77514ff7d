"""Compiled loops of planning in Aceso's cost model: seconds of every stage there can be, and the best way to cut.

Ops are told apart by kind only: a stage is known by the row of its first op (ops before the layers, ops of a layer, ops
after them), by its length, and by how many of the ops after the layers it holds.

Choosing the ops that run again is a dynamic program over ops. Its state is whether the last op runs again, with the
level of its run: the activations of big ops that the run drops in this layer. A cap on levels bounds the fullest run.
"""

import numpy as np
from numpy.typing import NDArray

from autopar.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

FORWARD, BACKWARD, KEPT, WEIGHTS, INPUTS, RESERVED_FORWARD, RESERVED_BACKWARD, OUTPUTS = range(8)
"""Columns of what is known of a kind of op: seconds, then bytes."""


@compiled
def append_op(
    best: Floats, new: Floats, seconds: float, may_start: bool, is_boundary: bool, following: Ints, fresh: int,
    units: int, top: int,
) -> None:  # fmt: skip
    """Append an op to a window: least seconds of running ops again, by the state of the last op and by units dropped.

    Args:
        best: (levels + 1, units) seconds to drop at least so many units; state 0: the last op does not run again.
        new: Result for the longer window.
        seconds: Forward of the op.
        may_start: Whether ops that run again may begin with it.
        is_boundary: Whether it begins a layer: what the op before it keeps is the layer's input.
        following: Per level, that after the op before it has dropped its activation, too; -1 beyond the cap.
        fresh: Level of a run that begins with the op, or goes on with it into another layer.
        units: What the op before it drops if both run again.
        top: Most units that the longer window can drop.
    """
    states = best.shape[0]
    for place in range(top + 1):  # one row at a time: loops over contiguous numbers become vector instructions
        new[0, place] = best[0, place]
    for state in range(1, states):
        for place in range(top + 1):
            new[0, place] = min(new[0, place], best[state, place])
            new[state, place] = np.inf
    if may_start:
        for place in range(top + 1):
            new[fresh + 1, place] = best[0, place] + seconds
    for level in range(states - 1):
        if following[level] < 0:
            continue
        target = fresh if is_boundary else following[level]
        gain = 0 if is_boundary else units
        nothing = best[level + 1, 0] + seconds
        for place in range(min(gain, top + 1)):
            new[target + 1, place] = min(new[target + 1, place], nothing)
        for place in range(top + 1 - gain):
            joined = best[level + 1, place] + seconds
            new[target + 1, place + gain] = min(new[target + 1, place + gain], joined)


@compiled
def record_stage(
    out: Floats, best: Floats, top: int, seconds: float, fixed: float, each: float, limit: float, fullest: float,
    loose: float, quantum: float,
) -> None:  # fmt: skip
    """Record the seconds of a window as a stage, by the number of stages behind it, where they are less than known.

    Args:
        out: (stages behind) seconds.
        best: (levels + 1, units) seconds to drop at least so many units.
        top: Most units that can be dropped.
        seconds: Forward and backward.
        fixed: Bytes of weights and their like, and of reserves.
        each: Bytes that a microbatch leaves behind if nothing runs again.
        limit: Bytes of a device.
        fullest: Bytes of a run in memory.
        loose: Bytes that may be dropped beside what units count.
        quantum: Bytes of a unit.
    """
    for behind in range(out.shape[0]):
        lack = fixed + each * (behind + 1) - limit
        if lack <= 0:
            out[behind] = min(out[behind], seconds)
            continue
        units = max(0, int(np.ceil(((lack + fullest) / (behind + 1) - loose) / quantum - 1e-9)))
        if units <= top:
            least = np.inf
            for state in range(best.shape[0]):
                least = min(least, best[state, units])
            out[behind] = min(out[behind], seconds + least)


@compiled
def stage_times(
    sequence: Ints, tail: Ints, table: Floats, units: Ints, following: Ints, may_start: Flags, starts_layer: Flags,
    limit: float, fullest: float, quantum: float, is_bound: bool, longest: float, out: Floats,
) -> None:  # fmt: skip
    """Fill in least seconds of all stages that begin with one op, by dynamic programming over their ops.

    Args:
        sequence: Kinds of ops from the first one on, as if layers never ended.
        tail: Kinds of the ops after the layers; empty if the first op is one of them.
        table: (kinds, 8) what is known of a kind.
        units: Per kind, whole units that it drops, rounded down.
        following: (kinds, levels) level of a run after a kind has dropped its activation; -1 beyond the cap.
        may_start: Per kind, whether ops that run again may begin with it.
        starts_layer: Per kind, whether it begins a layer.
        limit: Bytes of a device.
        fullest: Bytes of the fullest run: at least so many for a bound, at most so many for a plan.
        quantum: Bytes of a unit.
        is_bound: Whether what rounding took away is given back, so that no stage is faster than said.
        longest: Seconds beyond which a stage is not wanted.
        out: (ops of the tail + 1, ops, stages behind) seconds, lowered in place.
    """
    size = 2
    for place in range(sequence.shape[0]):
        size += units[sequence[place]]
    for place in range(tail.shape[0]):
        size += units[tail[place]]
    states = following.shape[1] + 1
    best, new = np.full((states, size), np.inf), np.full((states, size), np.inf)
    side, other = np.full((states, size), np.inf), np.full((states, size), np.inf)
    seconds = weights = kept = loose = forward = backward = least = 0.0
    top, previous, inputs = 0, -1, table[sequence[0], INPUTS]
    for place in range(sequence.shape[0]):
        kind = sequence[place]
        if previous < 0:
            best[0, 0] = 0.0
            best[1, 0] = table[kind, FORWARD] if may_start[kind] else np.inf
        else:
            if starts_layer[kind]:
                least += table[previous, KEPT]
            else:
                loose += table[previous, KEPT] - units[previous] * quantum
                top += units[previous]
            append_op(
                best, new, table[kind, FORWARD], may_start[kind], starts_layer[kind], following[previous],
                0, units[previous], top,
            )  # fmt: skip
            best, new = new, best
            forward = max(forward, table[previous, RESERVED_FORWARD])
            backward = max(backward, table[previous, RESERVED_BACKWARD])
        seconds += table[kind, FORWARD] + table[kind, BACKWARD]
        weights += table[kind, WEIGHTS]
        kept += table[kind, KEPT]
        if not seconds <= longest or not kept < np.inf:
            return
        fixed = 8 * weights + max(weights, forward + backward)
        if fixed + inputs + least > limit:  # whatever runs again
            return
        record_stage(
            out[0, place + 1], best, top, seconds, fixed, inputs + kept, limit, fullest, loose if is_bound else 0.0,
            quantum,
        )  # fmt: skip
        previous = kind
        next_kind = sequence[place + 1] if place + 1 < sequence.shape[0] else -1
        if tail.shape[0] == 0 or (next_kind >= 0 and not starts_layer[next_kind]):
            continue
        tail_top, tail_loose, last = top, loose, kind
        tail_seconds, tail_weights, tail_kept, tail_forward, tail_backward = seconds, weights, kept, forward, backward
        for state in range(states):
            for k in range(top + 1):
                side[state, k] = best[state, k]
        for count in range(tail.shape[0]):
            own = tail[count]
            tail_loose += table[last, KEPT] - units[last] * quantum
            for state in range(states):
                for k in range(tail_top + 1, tail_top + units[last] + 1):
                    side[state, k] = np.inf
            tail_top += units[last]
            append_op(
                side, other, table[own, FORWARD], may_start[own], False, following[last], 0, units[last], tail_top
            )
            side, other = other, side
            tail_forward = max(tail_forward, table[last, RESERVED_FORWARD])
            tail_backward = max(tail_backward, table[last, RESERVED_BACKWARD])
            tail_seconds += table[own, FORWARD] + table[own, BACKWARD]
            tail_weights += table[own, WEIGHTS]
            tail_kept += table[own, KEPT]
            if not tail_seconds <= longest or not tail_kept < np.inf:
                break
            tail_fixed = 8 * tail_weights + max(tail_weights, tail_forward + tail_backward)
            if place + count + 2 < out.shape[1]:
                record_stage(
                    out[count + 1, place + count + 2], side, tail_top, tail_seconds, tail_fixed, inputs + tail_kept,
                    limit, fullest, tail_loose if is_bound else 0.0, quantum,
                )  # fmt: skip
            last = own


@compiled
def cut_chain(
    costs: Floats, least: Floats, rows: Ints, tails: Ints, sizes: Ints, work: Floats, devices: int, node: int,
    most: int, threshold: float, sums: Floats, choices: Ints,
) -> None:  # fmt: skip
    """Cut a chain of ops into stages of devices so that no stage takes longer than a threshold and their sum is least.

    Args:
        costs: (sizes, 4, rows, tails, ops, stages behind) seconds of a stage, transfers included; the second dim is
            whether its input and its output cross nodes.
        least: (rows, tails, ops) the least of them, not falling with the number of ops.
        rows: Row of every op.
        tails: Ops after the layers before the end of a stage, per end.
        sizes: Devices of a stage.
        work: (ops + 1) seconds on one device that all ops before some op take at least.
        devices: All of them.
        node: Devices of a node, over whose border no stage may lie.
        most: Most stages.
        threshold: Most seconds of a stage.
        sums: (ops + 1, devices + 1, stages + 1) result: least sum of what begins with an op.
        choices: The same dims: ops of the first stage times number of sizes, plus its size.
    """
    ops = rows.shape[0]
    for first in range(sums.shape[0]):
        for used in range(sums.shape[1]):
            for stages in range(sums.shape[2]):
                sums[first, used, stages] = np.inf
                choices[first, used, stages] = -1
    sums[ops, 0, 0] = 0.0
    tail_start = ops
    while tail_start > 0 and tails[tail_start] > 0:
        tail_start -= 1
    for first in range(ops - 1, -1, -1):
        row = rows[first]
        fewest = int(np.ceil((work[ops] - work[first]) / threshold - 1e-9))
        highest = devices - int(np.ceil(work[first] / threshold - 1e-9))
        count = 0
        while count < min(ops - first, costs.shape[4] - 1):
            count += 1
            end = first + count
            tail = tails[end]
            if not least[row, tail, count] <= threshold:
                if tail == 0:
                    count = max(count, tail_start - first)
                continue
            for size in range(sizes.shape[0]):
                own = sizes[size]
                for used in range(max(own, fewest), highest + 1):
                    before = devices - used
                    if before % node + own > node:
                        continue
                    crossing = 2 * (before > 0 and before % node == 0) + ((before + own) % node == 0)
                    for stages in range(1, min(used, most) + 1):
                        cost = costs[size, crossing, row, tail, count, stages - 1]
                        total = cost + sums[end, used - own, stages - 1]
                        if total < sums[first, used, stages] and cost <= threshold:
                            sums[first, used, stages] = total
                            choices[first, used, stages] = count * sizes.shape[0] + size

"""The stack of a user who names none: the fitted one nearest to the cluster.

A planner finds the optimism of its costs and lives there, so that figures of a data sheet alone are no default. Of the
stacks that were fitted on the cluster's device, those with fused attention before those without, the first in the order
of `USUAL` is taken; where there is none, that of the device of the same kind whose peak and memory bandwidth are
nearest, and the answer says that it is not calibrated.
"""

import math
from pathlib import Path

from autopar.cluster import PRESETS, Cluster, Device
from autopar.cost.stack import IDEAL, NEAREST, Stack, bundled_stacks, load_stack

USUAL = ("megatron-core", "megatron", "maxtext", "fsdp-compile", "deepspeed", "fsdp-eager")
"""Beginnings of names of stacks, those that most large jobs run on first."""
WIDER = 2.0
"""Factor on the error of a fit on another device. Set by hand: no measured row says what it should be."""


def resolve_stack(stack: str | Path | Stack, cluster: Cluster) -> Stack:
    """Return a stack: a record as it is, else by name or file, `NEAREST` for the one that is nearest to a cluster.

    Raises:
        StackError: If there is no such stack, or its file is wrong.
    """
    if isinstance(stack, Stack):
        return stack
    return nearest_stack(cluster) if str(stack).lower() == NEAREST else load_stack(stack)


def nearest_stack(cluster: Cluster) -> Stack:
    """Return the fitted stack nearest to a cluster; the ideal one if none was fitted on a device of its kind."""
    fitted = [stack for stack in bundled_stacks().values() if stack.fit is not None and stack.clusters]
    ranked = sorted(fitted, key=_rank)
    own = next((stack for stack in ranked if is_for(stack, cluster)), None)
    if own is not None:
        return own
    alike = [
        (_distance(cluster.device, preset.device), order, stack)
        for order, stack in enumerate(ranked)
        for preset in (PRESETS[name] for name in stack.clusters if name in PRESETS)
        if bool(preset.intra.torus) == bool(cluster.intra.torus)
    ]
    return min(alike, key=lambda found: found[:2])[2] if alike else IDEAL


def is_for(stack: Stack, cluster: Cluster) -> bool:
    """Return whether a stack was made for the device of a cluster."""
    return any(PRESETS[name].device == cluster.device for name in stack.clusters if name in PRESETS)


def step_error(stack: Stack, cluster: Cluster) -> float | None:
    """Return the mean error of step times of a stack, as a share; None without a fit.

    That is the error on the rows of the fit or on rows that it did not see, whichever is larger.

    On another device than those of the fit it is wider by `WIDER`.
    """
    if stack.fit is None:
        return None
    error = max(stack.fit.error, stack.fit.held_out or 0.0)
    return error if not stack.clusters or is_for(stack, cluster) else WIDER * error


def _rank(stack: Stack) -> tuple[bool, int]:
    usual = next((order for order, name in enumerate(USUAL) if stack.name.startswith(name)), len(USUAL))
    return stack.attention != "fused", usual


def _distance(one: Device, other: Device) -> float:
    """Return how far two devices are from each other: logarithms of peaks and of memory bandwidths."""
    peaks = dict(one.peaks).get("half", 0.0), dict(other.peaks).get("half", 0.0)
    apart = abs(math.log(peaks[0] / peaks[1])) if all(peaks) else math.inf
    return apart + abs(math.log(one.memory_bandwidth / other.memory_bandwidth))

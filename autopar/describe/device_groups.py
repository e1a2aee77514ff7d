"""Stages and device groups told apart: what a record of the simulator is of, where groups have several stages."""

from autopar.plan import Plan


def group_word(groups: int, stages: int) -> str:
    """Return what each of so many groups of devices is called: a stage, if it has no more than one.

    >>> group_word(4, 4), group_word(4, 8)
    ('stage', 'device group')
    """
    return "stage" if groups == stages else "device group"


def track_word(plan: Plan) -> str:
    """Return what is simulated apart of a plan: stages, device groups of several stages, or shares of the batch."""
    if plan.shares and len(plan.stages) == 1:
        return "share"
    return group_word(len({stage.devices for stage in plan.stages}), len(plan.stages))


def device_groups(plan: Plan) -> tuple[int, ...]:
    """Return the device group of every stage of a plan; stages of a group have the same devices."""
    numbers: dict[tuple[int, int], int] = {}
    return tuple(numbers.setdefault(stage.devices, len(numbers)) for stage in plan.stages)

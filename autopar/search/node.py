"""Nodes of the branch and bound, in classes that are opened one after the other."""

import math
from dataclasses import dataclass
from enum import IntEnum

from autopar.configuration import PLAIN, Family
from autopar.formulate.data_major import is_data_major
from autopar.search.outcome import NodeStatus


class Priority(IntEnum):
    """Classes of nodes, in the order in which they are opened.

    Plain schedules (1F1B, GPipe) come first: bounds of the other schedules follow from theirs. Meshes with an outer
    data-parallel axis are twice as many as all others and seldom better by much, so that they have a limit of tasks;
    so have pipelines with data parallelism around them.
    """

    PLAIN = 0
    OTHER_SCHEDULES = 1
    OUTER_DATA_PARALLEL = 2


def priority_of(family: Family) -> Priority:
    """Return the class of a node."""
    if is_data_major(family[0].mesh) or family[0].block:
        return Priority.OUTER_DATA_PARALLEL
    return Priority.PLAIN if family[0].schedule in PLAIN else Priority.OTHER_SCHEDULES


@dataclass(slots=True, eq=False)
class Node:
    """A node of the branch and bound.

    Attributes:
        family: Configurations that differ in the schedule only.
        priority: Its class.
        bound: Lower bound on all its plans, in seconds.
        status: How far the work on it is.
        relaxed: Whether its relaxation was solved, so that it can be advanced.
        advanced: Tasks beyond the relaxation.
        best: Objective of its best plan, in seconds.
        improves: Whether its last task improved its best plan.
    """

    family: Family
    priority: Priority
    bound: float
    status: NodeStatus = NodeStatus.NEW
    relaxed: bool = False
    advanced: int = 0
    best: float = math.inf
    improves: bool = False

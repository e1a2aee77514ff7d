"""Which ranks take part in a transfer: so many members, so many of them on each node."""

from autopar.events import Event, OverlapEvent, TransferEvent
from autopar.ranks.communicator import Group


def group_for(members: int, inside: int, ranks: int, local_ranks: int) -> Group | None:
    """Return the ranks of a group; None if there are not enough.

    Args:
        members: Size of the group.
        inside: Consecutive members that share a node.
        ranks: Ranks there are.
        local_ranks: Ranks of each node.

    >>> group_for(4, 4, 4, 4), group_for(2, 1, 4, 2), group_for(4, 2, 4, 2), group_for(2, 1, 2, 2)
    ((0, 1, 2, 3), (0, 2), (0, 1, 2, 3), None)
    """
    nodes = members // inside
    if inside > local_ranks or nodes * local_ranks > ranks:
        return None
    return tuple(node * local_ranks + place for node in range(nodes) for place in range(inside))


def group_of_event(event: Event, ranks: int, local_ranks: int) -> Group | None:
    """Return the ranks that take part in an event; all of them in what one device does alone, None if too few."""
    match event:
        case TransferEvent(members=members, inside=inside) if members > 1:
            return group_for(members, inside, ranks, local_ranks)
        case OverlapEvent(members=members):
            return group_for(members, members, ranks, local_ranks)
        case _:
            return tuple(range(ranks))

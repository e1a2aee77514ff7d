"""Pipeline schedules: in which order the devices of a pipeline run its stages and microbatches.

A pipeline runs on groups of devices. Usually each group has one stage; some schedules give it several, its *chunks*:
interleaved, group g of p has stages g, g + p, g + 2p and so on; in the shape of a V it has stages g and 2p - 1 - g.

A schedule is one small class; adding one is a class and a line in `SCHEDULES`, which may stand in another package:

    class Mine(Schedule):
        def order(self, group, num_groups, num_microbatches, num_chunks=1):
            return ...

    SCHEDULES["mine"] = Mine()

The order alone decides how many microbatches a group holds at once, which is what the planner needs, and when it runs
them, which is what the simulator needs.
"""

from autopar.schedule.base import Pass, Schedule, Task, chunks_of
from autopar.schedule.dependencies import follow
from autopar.schedule.joint import ForwardOnly, GPipe, Interleaved, OneForwardOneBackward
from autopar.schedule.zero_bubble import ZeroBubble, ZeroBubbleV

__all__ = ["SCHEDULES", "Pass", "Schedule", "Task", "ZeroBubble", "chunks_of", "follow", "usual_schedule"]

SCHEDULES: dict[str, Schedule] = {
    "1f1b": OneForwardOneBackward(),
    "gpipe": GPipe(),
    "interleaved": Interleaved(),
    "zb-h1": ZeroBubble(ahead=1, late=1),
    "zb-h2": ZeroBubble(ahead=2, late=2),
    "zb-v": ZeroBubbleV(),
    "forward-only": ForwardOnly(),
}


def usual_schedule(mode: str) -> str:
    """Return the schedule of plans that name none: 1F1B in mode "train", forward-only in mode "infer"."""
    return "1f1b" if mode == "train" else "forward-only"

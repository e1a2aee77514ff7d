"""Pipeline schedules: the order in which each group of devices runs the passes of its stages over the microbatches.

`SCHEDULES` lists the known ones: 1F1B, GPipe, interleaved 1F1B, 1F1B with overlapped all-to-all, zero-bubble ZB-H1,
ZB-H2 and ZB-V, DualPipeV, and forward-only inference.

A pipeline runs on groups of devices. Usually a group runs one stage. Some schedules give a group several stages, its
*chunks* (virtual pipeline stages of Megatron-LM): with interleaving, group g of p runs stages g, g + p, g + 2p, ...;
with a V, it runs stages g and 2p - 1 - g.

A schedule is one small class. Adding a schedule takes a class and a line in `SCHEDULES`, in this package or in another
one:

    class Mine(Schedule):
        def order(self, group, num_groups, num_microbatches, num_chunks=1):
            return ...

    SCHEDULES["mine"] = Mine()

The planner derives the number of microbatches in flight from the order, and the simulator derives the start and end of
every task from it.
"""

from autopar.schedule.base import Pass, Schedule, Task, chunks_of
from autopar.schedule.dependencies import topological_order
from autopar.schedule.dual_pipe import DualPipeV
from autopar.schedule.joint import ForwardOnly, GPipe, Interleaved, OneForwardOneBackward, Overlapped
from autopar.schedule.zero_bubble import ZeroBubble, ZeroBubbleV

__all__ = ["SCHEDULES", "Pass", "Schedule", "Task", "ZeroBubble", "chunks_of", "topological_order", "usual_schedule"]

SCHEDULES: dict[str, Schedule] = {
    "1f1b": OneForwardOneBackward(),
    "gpipe": GPipe(),
    "interleaved": Interleaved(),
    "zb-h1": ZeroBubble(ahead=1, late=1),
    "zb-h2": ZeroBubble(ahead=2, late=2),
    "zb-v": ZeroBubbleV(),
    "1f1b-a2a": Overlapped(),
    "dualpipe-v": DualPipeV(),
    "forward-only": ForwardOnly(),
}


def usual_schedule(mode: str) -> str:
    """Return the default schedule of a mode: 1F1B for "train", forward-only for "infer"."""
    return "1f1b" if mode == "train" else "forward-only"

"""Time on a link that less urgent traffic has for itself.

On this clock nothing interrupts a job: it stands still while something more urgent has the link. So jobs of given
seconds that follow each other can be planned as if they were alone, and their ends be read off in real time.
"""

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


class LinkClock:
    """The free seconds of a link.

    Args:
        busy: When something more urgent has it: starts and ends, (intervals, 2), which may overlap.

    >>> clock = LinkClock(np.array([(1.0, 2.0), (4.0, 6.0)]))
    >>> clock.free(np.array([0.5, 1.5, 3.0, 7.0])).tolist(), clock.time(np.array([0.5, 1.0, 2.5, 4.0])).tolist()
    ([0.5, 1.0, 2.0, 4.0], [0.5, 1.0, 3.5, 7.0])
    """

    def __init__(self, busy: FloatArray) -> None:
        ordered = busy[busy[:, 1] > busy[:, 0]]
        ordered = ordered[np.argsort(ordered[:, 0], kind="stable")]
        reach = np.maximum.accumulate(ordered[:, 1]) if len(ordered) else ordered[:, 1]
        new = np.ones(len(ordered), np.bool_)
        new[1:] = ordered[1:, 0] > reach[:-1]
        self._starts = ordered[new, 0]
        self._ends = reach[np.append(np.flatnonzero(new)[1:] - 1, len(ordered) - 1)] if len(ordered) else reach
        self._taken = np.concatenate([[0.0], np.cumsum(self._ends - self._starts)])

    def free(self, time: FloatArray) -> FloatArray:
        """Return the free seconds before moments."""
        index = np.searchsorted(self._starts, time, side="right")
        if not len(self._ends):
            return np.asarray(time, np.float64)
        inside = np.where(index > 0, np.maximum(0.0, self._ends[index - 1] - time), 0.0)
        return np.asarray(time - (self._taken[index] - inside))

    def time(self, free: FloatArray) -> FloatArray:
        """Return the first moments before which there are so many free seconds."""
        index = np.searchsorted(self._starts - self._taken[:-1], free, side="left")
        return np.asarray(free + self._taken[index])

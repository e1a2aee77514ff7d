"""What this process may use of the machine, and has used."""

import os
import resource


def usable_cores() -> int:
    """Return how many cores this process may use, as far as the system says."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def peak_bytes() -> float:
    """Return how many bytes of memory this process has had at most, pages that it shares with others included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0  # Linux counts in KiB

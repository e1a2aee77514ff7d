"""What this process may use of the machine, what it has used, and for whom it works."""

import os
import resource
import threading


def usable_cores() -> int:
    """Return how many cores this process may use, as far as the system says."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pin_to_cores(rank: int, threads: int) -> None:
    """Keep this process on cores of its own, as many as it has threads, where the system can do that."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        own = {cores[(rank * threads + number) % len(cores)] for number in range(threads)}
        os.sched_setaffinity(0, own)


def peak_bytes() -> float:
    """Return how many bytes of memory this process has had at most, pages that it shares with others included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0  # Linux counts in KiB


def follow_parent() -> None:
    """Have this process, a worker, end with the one that started it, however that ends: killed, it tells nobody."""
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    import multiprocessing  # here, for commands without workers start sooner
    from multiprocessing.connection import wait

    parent = multiprocessing.parent_process()
    assert parent is not None, "workers are started by another process"
    wait([parent.sentinel])
    os._exit(1)

"""Ranks as threads of one process, on numpy arrays: the communicator that tests hold the real one against."""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.ranks.communicator import Communicator, Group, Handle, Memory

Array = NDArray[Any]

_TIMEOUT = 30.0  # seconds until a rank that waits for others is a failure
_REDUCE = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


class NumpyMemory(Memory):
    """Memory of the host."""

    device = "cpu"
    index = 0
    xp = np

    def empty(self, shape: Sequence[int], dtype: str) -> Array:
        """Return an array."""
        return np.empty(shape, dtype)

    def zeros(self, shape: Sequence[int], dtype: str) -> Array:
        """Return an array."""
        return np.zeros(shape, dtype)

    def load(self, array: Array) -> Array:
        """Return a copy."""
        return np.array(array, order="C")

    def fetch(self, tensor: Array) -> Array:
        """Return the array."""
        return tensor

    def offload(self, tensor: Array) -> Array:
        """Return a copy."""
        return tensor.copy()

    def back(self, tensor: Array) -> Array:
        """Return a copy."""
        return tensor.copy()

    def contiguous(self, tensor: Array) -> Array:
        """Return the array in row-major order."""
        return np.asarray(tensor, order="C")

    def copy(self, tensor: Array) -> Array:
        """Return a copy."""
        return np.array(tensor, order="C")

    def blank(self, like: Array, shape: Sequence[int]) -> Array:
        """Return an array."""
        return np.empty(shape, like.dtype)

    def filled(self, like: Array, shape: Sequence[int], value: float) -> Array:
        """Return an array of one value."""
        return np.full(shape, value, like.dtype)

    def lowest(self, tensor: Array) -> float:
        """Return the lowest number."""
        return -np.inf if tensor.dtype.kind == "f" else int(np.iinfo(tensor.dtype).min)

    def pointer(self, tensor: Array) -> int:
        """Return the address."""
        assert tensor.flags.c_contiguous, "what is bound must be contiguous"
        return int(tensor.ctypes.data)


class _Done(Handle):
    def wait(self) -> None:
        """Return at once."""


class _Later(Handle):
    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def wait(self) -> None:
        """Act."""
        self._action()


class LocalWorld:
    """What the threads share: a queue per directed pair of ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.failed = threading.Event()
        self._queues = {(i, j): queue.SimpleQueue[Array]() for i in range(size) for j in range(size)}

    def put(self, source: int, target: int, array: Array) -> None:
        """Send a copy."""
        self._queues[source, target].put(array.copy())

    def get(self, source: int, target: int) -> Array:
        """Wait for the next array."""
        for _ in range(int(_TIMEOUT / 0.05)):
            try:
                return self._queues[source, target].get(timeout=0.05)
            except queue.Empty:
                if self.failed.is_set():
                    break
        raise TimeoutError(f"rank {target} gets nothing from rank {source}")

    def run(self, work: Callable[["LocalCommunicator"], Any]) -> list[Any]:
        """Return what every rank returns; the first failure ends all."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def target(rank: int) -> None:
            try:
                results[rank] = work(LocalCommunicator(self, rank))
            except BaseException as error:
                errors.append(error)
                self.failed.set()

        threads = [threading.Thread(target=target, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


class LocalCommunicator(Communicator):
    """Collectives by sending everything to everybody; what is sent to one rank arrives in the order it was sent."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self._world = world
        self._rank = rank

    @property
    def rank(self) -> int:
        """Own number."""
        return self._rank

    def _all(self, array: Array, group: Group) -> Callable[[], list[Array]]:
        """Send to all; the returned function receives from all. It is called in the order of the sends."""
        for peer in group:
            self._world.put(self._rank, peer, array)
        return lambda: [self._world.get(peer, self._rank) for peer in group]

    def all_reduce(self, tensor: Array, reduce: str, group: Group) -> Handle:
        """Reduce in place."""
        parts = self._all(tensor, group)()
        tensor[...] = _REDUCE[reduce].reduce(np.stack(parts), axis=0)
        return _Done()

    def all_gather(self, out: Array, tensor: Array, group: Group) -> Handle:
        """Gather."""
        out[...] = np.stack(self._all(tensor, group)())
        return _Done()

    def reduce_scatter(self, out: Array, tensor: Array, group: Group) -> Handle:
        """Sum own pieces."""
        out[...] = np.stack(self._all(tensor, group)())[:, group.index(self._rank)].sum(axis=0)
        return _Done()

    def all_to_all(self, out: Array, tensor: Array, group: Group) -> Handle:
        """Transpose pieces."""
        out[...] = np.stack(self._all(tensor, group)())[:, group.index(self._rank)]
        return _Done()

    def swap(self, sends: Sequence[tuple[Array, int]], receives: Sequence[tuple[Array, int]], group: Group) -> Handle:
        """Send and receive."""
        for tensor, peer in sends:
            self._world.put(self._rank, peer, tensor)
        for tensor, peer in receives:
            tensor[...] = self._world.get(peer, self._rank)
        return _Done()

    def send(self, tensor: Array, peer: int) -> Handle:
        """Send."""
        self._world.put(self._rank, peer, tensor)
        return _Done()

    def receive(self, tensor: Array, peer: int) -> Handle:
        """Receive when waited for."""

        def take() -> None:
            tensor[...] = self._world.get(peer, self._rank)

        return _Later(take)

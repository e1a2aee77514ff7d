"""What a rank needs of a library of collectives, and of the memory its tensors live in.

A tensor is whatever the memory makes: a torch tensor, a numpy array. All tensors handed to a communicator are
contiguous. A *group* is a tuple of ranks in the order of a mesh axis; pieces are numbered by position in it.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

Tensor = Any
"""A tensor of the memory in use."""

Group = tuple[int, ...]


class Handle(Protocol):
    """Communication under way."""

    def wait(self) -> None:
        """Return when its results can be read and its operands be changed."""


class Communicator(Protocol):
    """Collectives between the ranks of a group; every rank of the group makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """Own number."""

    def all_reduce(self, tensor: Tensor, reduce: str, group: Group) -> Handle:
        """Replace a tensor by the "sum", "max", "min" or "prod" of all of them."""

    def all_gather(self, out: Tensor, tensor: Tensor, group: Group) -> Handle:
        """Fill `out` (n, ...) with the tensors of all."""

    def reduce_scatter(self, out: Tensor, tensor: Tensor, group: Group) -> Handle:
        """Fill `out` with the sum of all ranks' piece number `own position` of `tensor` (n, ...)."""

    def all_to_all(self, out: Tensor, tensor: Tensor, group: Group) -> Handle:
        """Fill piece i of `out` (n, ...) with piece number `own position` of rank i's `tensor` (n, ...)."""

    def swap(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], group: Group) -> Handle:
        """Send tensors to ranks of the group and receive others; every send has its receive among the same calls."""

    def send(self, tensor: Tensor, peer: int) -> Handle:
        """Send a tensor to any rank; what is sent to one rank arrives in order."""

    def receive(self, tensor: Tensor, peer: int) -> Handle:
        """Receive a tensor from any rank."""


class Memory(Protocol):
    """Where the tensors of a rank live, and the few things done to them there.

    Attributes:
        device: "cpu" or "cuda".
        index: Number of the device on its machine.
        xp: The array module (`numpy`, `torch`), of which only what both have alike is used.
    """

    device: str
    index: int
    xp: Any

    def empty(self, shape: Sequence[int], dtype: str) -> Tensor:
        """Return an uninitialised tensor; `dtype` is a name of the IR."""

    def zeros(self, shape: Sequence[int], dtype: str) -> Tensor:
        """Return a tensor of zeros."""

    def load(self, array: NDArray[Any]) -> Tensor:
        """Return a contiguous copy of an array on the host."""

    def fetch(self, tensor: Tensor) -> NDArray[Any]:
        """Return a tensor as an array on the host."""

    def offload(self, tensor: Tensor) -> Tensor:
        """Return a copy in the memory of the host."""

    def back(self, tensor: Tensor) -> Tensor:
        """Return a copy, where tensors live, of one in the memory of the host."""

    def contiguous(self, tensor: Tensor) -> Tensor:
        """Return the tensor with its elements in row-major order."""

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a contiguous tensor of its own."""

    def blank(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Return an uninitialised tensor of the element type of another one."""

    def filled(self, like: Tensor, shape: Sequence[int], value: float) -> Tensor:
        """Return a tensor of one value and of the element type of another."""

    def lowest(self, tensor: Tensor) -> float:
        """Return the lowest number of an element type: minus infinity for floats."""

    def pointer(self, tensor: Tensor) -> int:
        """Return the address of the first element."""

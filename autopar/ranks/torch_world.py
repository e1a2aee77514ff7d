"""Ranks as processes: collectives of `torch.distributed`, tensors in memory of torch."""

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from autopar.errors import JobError, RankError
from autopar.ranks.communicator import Communicator, Group, Handle, Memory, Tensor

Array = NDArray[Any]

TIMEOUT = timedelta(minutes=5)
"""How long a rank waits for another one; whoever started the ranks notices much sooner that one is gone."""

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "prod": dist.ReduceOp.PRODUCT}


class TorchMemory(Memory):
    """Memory of the host, or of one GPU.

    Args:
        device: "cpu" or "cuda".
        index: Number of the GPU.
    """

    xp = torch

    def __init__(self, device: str, index: int = 0) -> None:
        self.device = device
        self.index = index
        self._device = torch.device(device, index) if device == "cuda" else torch.device(device)
        if device == "cuda":
            # a stream of its own, whose address is not 0: to the runtime that means one of its own making
            torch.cuda.set_device(index)
            torch.cuda.set_stream(torch.cuda.Stream(self._device))

    def empty(self, shape: Sequence[int], dtype: str) -> Tensor:
        """Return an uninitialised tensor."""
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=self._device)

    def zeros(self, shape: Sequence[int], dtype: str) -> Tensor:
        """Return a tensor of zeros."""
        return torch.zeros(tuple(shape), dtype=getattr(torch, dtype), device=self._device)

    def load(self, array: Array) -> Tensor:
        """Return a contiguous copy of an array."""
        if array.dtype.name == "bfloat16":  # numpy has no such type of its own, and torch does not know the foreign one
            bits = torch.from_numpy(np.array(array, order="C").view(np.int16))
            return bits.view(torch.bfloat16).to(self._device)
        return torch.from_numpy(np.array(array, order="C")).to(self._device)

    def fetch(self, tensor: Tensor) -> Array:
        """Return a tensor as an array on the host; bfloat16 as float32, which holds it exactly."""
        host = tensor.detach().cpu()
        return np.asarray(host.float().numpy() if host.dtype == torch.bfloat16 else host.numpy())

    def offload(self, tensor: Tensor) -> Tensor:
        """Return a copy in the memory of the host."""
        return tensor.detach().to("cpu", copy=True)

    def back(self, tensor: Tensor) -> Tensor:
        """Return a copy on the device of one in the memory of the host."""
        return tensor.to(self._device, copy=True)

    def contiguous(self, tensor: Tensor) -> Tensor:
        """Return the tensor in row-major order."""
        return tensor.contiguous()

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy."""
        return tensor.clone(memory_format=torch.contiguous_format)

    def blank(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Return an uninitialised tensor."""
        return torch.empty(tuple(shape), dtype=like.dtype, device=self._device)

    def filled(self, like: Tensor, shape: Sequence[int], value: float) -> Tensor:
        """Return a tensor of one value."""
        return torch.full(tuple(shape), value, dtype=like.dtype, device=self._device)

    def lowest(self, tensor: Tensor) -> float:
        """Return the lowest number of an element type."""
        return float("-inf") if tensor.dtype.is_floating_point else int(torch.iinfo(tensor.dtype).min)

    def pointer(self, tensor: Tensor) -> int:
        """Return the address of the first element."""
        assert tensor.is_contiguous(), "what is bound must be contiguous"
        return int(tensor.data_ptr())

    def stream(self) -> int | None:
        """Return the address of the stream torch works on; None on the host."""
        return int(torch.cuda.current_stream(self._device).cuda_stream) if self.device == "cuda" else None


class _Work(Handle):
    """Communication under way; on a GPU `wait` returns when it is done there, so that its seconds are its own."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for all of it.

        Raises:
            RankError: If another rank is gone.
        """
        _guarded(lambda: [work.wait() for work in self._works if work is not None])
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()


class _Sum(Handle):
    """Pieces under way that will be added."""

    def __init__(self, handle: Handle, pieces: Tensor, out: Tensor) -> None:
        self._handle = handle
        self._pieces = pieces
        self._out = out

    def wait(self) -> None:
        """Add them when all are there."""
        self._handle.wait()
        torch.sum(self._pieces, 0, out=self._out)


def _guarded(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except RuntimeError as error:  # what torch raises for connections closed by the other side, and for timeouts
        reason = str(error).splitlines()[0]
        raise RankError(f"lost the connection to another rank: {reason}", hint="see what ended that rank") from error


class TorchCommunicator(Communicator):
    """Collectives of the default process group and of its subgroups.

    Args:
        groups: All groups of ranks that will communicate, the same on every rank.
        backend: "gloo" or "nccl".
    """

    def __init__(self, groups: Iterable[Group], backend: str) -> None:
        self._backend = backend
        self._rank: int = dist.get_rank()
        size: int = dist.get_world_size()
        self._groups: dict[Group, Any] = {tuple(range(size)): dist.group.WORLD}
        for group in groups:
            if group not in self._groups:
                self._groups[group] = dist.new_group(group, timeout=TIMEOUT)
        # Over NCCL two ranks that send to each other need a channel per direction: a send there waits for its receive.
        self._channels: dict[bool, Any] = dict.fromkeys((True, False), dist.group.WORLD)
        if backend == "nccl":
            self._channels = {upwards: dist.new_group(timeout=TIMEOUT) for upwards in (True, False)}

    @property
    def rank(self) -> int:
        """Own number."""
        return self._rank

    def all_reduce(self, tensor: Tensor, reduce: str, group: Group) -> Handle:
        """Reduce in place."""
        process_group = self._groups[group]
        return self._begun(lambda: dist.all_reduce(tensor, _OPS[reduce], process_group, async_op=True))

    def all_gather(self, out: Tensor, tensor: Tensor, group: Group) -> Handle:
        """Gather into a stack."""
        process_group = self._groups[group]
        return self._begun(
            lambda: dist.all_gather_single(out.view(-1), tensor.view(-1), group=process_group, async_op=True)
        )

    def reduce_scatter(self, out: Tensor, tensor: Tensor, group: Group) -> Handle:
        """Sum pieces of a stack; gloo's own way to do it takes three times as long as to swap them and add."""
        process_group = self._groups[group]
        if self._backend == "gloo":
            received = torch.empty_like(tensor)
            return _Sum(self.all_to_all(received, tensor, group), received, out)
        return self._begun(
            lambda: dist.reduce_scatter_single(out.view(-1), tensor.view(-1), group=process_group, async_op=True)
        )

    def all_to_all(self, out: Tensor, tensor: Tensor, group: Group) -> Handle:
        """Exchange pieces of stacks."""
        process_group = self._groups[group]
        return self._begun(lambda: dist.all_to_all_single(out, tensor, group=process_group, async_op=True))

    def swap(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], group: Group) -> Handle:
        """Send and receive at once."""
        process_group = self._groups[group]
        calls = [dist.P2POp(dist.isend, tensor, peer, process_group) for tensor, peer in sends]
        calls += [dist.P2POp(dist.irecv, tensor, peer, process_group) for tensor, peer in receives]
        return _Work(_guarded(lambda: dist.batch_isend_irecv(calls)) if calls else [])

    def send(self, tensor: Tensor, peer: int) -> Handle:
        """Send."""
        channel = self._channels[self._rank < peer]
        return self._begun(lambda: dist.isend(tensor, peer, channel))

    def receive(self, tensor: Tensor, peer: int) -> Handle:
        """Receive."""
        channel = self._channels[peer < self._rank]
        return self._begun(lambda: dist.irecv(tensor, peer, channel))

    def _begun(self, call: Callable[[], Any]) -> Handle:
        return _Work([_guarded(call)])


def join(backend: str, init_method: str, rank: int, size: int) -> TorchMemory:
    """Join the other ranks and return the memory to work in.

    Args:
        backend: "gloo" or "nccl".
        init_method: Where they meet, as `torch.distributed.init_process_group` takes it.
        rank: Own number.
        size: Number of ranks.

    Raises:
        JobError: If NCCL is asked for and there is no GPU for this rank.
        RankError: If the others do not come.
    """
    memory = TorchMemory("cpu")
    if backend == "nccl":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count or not dist.is_nccl_available():
            raise JobError("backend nccl needs GPUs, and torch finds none here", hint="use --backend gloo")
        memory = TorchMemory("cuda", rank % count)
    _guarded(
        lambda: dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=size, timeout=TIMEOUT)
    )
    return memory


def told_by_first(names: Sequence[str]) -> list[str]:
    """Return the names that rank 0 has, on every rank."""
    told: list[Any] = [list(names)]
    _guarded(lambda: dist.broadcast_object_list(told, src=0))
    return [str(name) for name in told[0]]


def leave() -> None:
    """Leave the other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()


def describe(memory: TorchMemory) -> str:
    """Return the device in words."""
    if memory.device == "cuda":
        return str(torch.cuda.get_device_name(memory.index))
    return f"CPU, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''} per rank"

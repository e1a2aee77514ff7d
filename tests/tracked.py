"""Peak memory of training steps of torch modules, by PyTorch's own tracker, on fake tensors and a fake process group.

Modules have the parameters of the zoo's models and run as torchtitan runs them: FSDP2 with a unit per block, tensor
parallelism by `parallelize_module`, activation checkpointing per block, AdamW, cross-entropy in float32. Nothing is
computed and nothing is sent; what eager PyTorch would allocate on rank 0 is counted to the byte.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a transformer.

    Attributes:
        kind: "gpt", "llama", "bert" or "vit".
        layers: Blocks.
        hidden: Width.
        heads: Attention heads.
        kv_heads: Heads of keys and values.
        ffn: Width of the MLP.
        seq: Tokens per sequence, the class token of an image included.
        vocab: Tokens in the vocabulary, or classes.
        patch: Pixels of a patch's side, of images.
        image: Pixels of an image's side.
    """

    kind: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    seq: int
    vocab: int
    patch: int = 0
    image: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """How a step is laid out over devices.

    Attributes:
        fsdp: Devices that share parameters; 1 for no FSDP.
        tp: Tensor-parallel devices.
        sequence_parallel: Whether norms and residuals are split along the sequence.
        recompute: "none", "full", "selective": norms, activations and additions run again, or "by op": so does every
            second product, as in torchtitan's selective checkpointing by op.
        reshard: Whether FSDP frees the parameters of a block after its forward.
        bf16: Whether FSDP computes in bfloat16; else all is float32.
    """

    fsdp: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    recompute: str = "none"
    reshard: bool = True
    bf16: bool = True


@torch.library.custom_op("autopar_tests::flash", mutates_args=())
def _flash(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Fused attention: its result, and a float32 number per query and head."""
    raise NotImplementedError("only traced on fake tensors")


@_flash.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("autopar_tests::flash_grad", mutates_args=())
def _flash_grad(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError("only traced on fake tensors")


@_flash_grad.register_fake
def _(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep_operands(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _flash_backward(ctx: Any, dy: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return _flash_grad(dy, *ctx.saved_tensors)


_flash.register_autograd(_flash_backward, setup_context=_keep_operands)


@torch.library.custom_op("autopar_tests::rms_norm", mutates_args=())
def _rms_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """RMSNorm as CUDA's fused kernel has it: its result, and a float32 number per row."""
    raise NotImplementedError("only traced on fake tensors")


@_rms_norm.register_fake
def _(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@torch.library.custom_op("autopar_tests::rms_norm_grad", mutates_args=())
def _rms_norm_grad(dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("only traced on fake tensors")


@_rms_norm_grad.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _keep_row_scale(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, output[1])


_rms_norm.register_autograd(lambda ctx, dy, _: _rms_norm_grad(dy, *ctx.saved_tensors), setup_context=_keep_row_scale)


class _VocabularyLoss(torch.autograd.Function):
    """Cross-entropy of logits split over the vocabulary, by the kernels of `loss_parallel` of torch, nothing sent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, labels: Tensor) -> Tensor:
        shifted = x - torch.amax(x, -1, keepdim=True)
        total = torch.sum(torch.exp(shifted), -1, keepdim=True)
        result = shifted - torch.log(total)
        ctx.save_for_backward(result, labels)
        return -result.gather(-1, labels[:, None]).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        result, labels = ctx.saved_tensors
        of_labels = torch.zeros_like(result).scatter_(-1, labels[:, None], -1.0)
        return (of_labels + torch.exp(result)) * grad, None


class _RMSNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden))

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            return _rms_norm(x, self.weight)[0]
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return DTensor.from_local(_rms_norm(x.to_local(), weight)[0], x.device_mesh, x.placements)


class _Attention(nn.Module):
    """Self-attention with a matrix each for queries, keys, values and results."""

    def __init__(self, sizes: Sizes, bias: bool) -> None:
        super().__init__()
        self.size, self.rotary = sizes.hidden // sizes.heads, sizes.kind == "llama"
        width = sizes.kv_heads * self.size
        self.q = nn.Linear(sizes.hidden, sizes.hidden, bias=bias)
        self.k = nn.Linear(sizes.hidden, width, bias=bias)
        self.v = nn.Linear(sizes.hidden, width, bias=bias)
        self.out = nn.Linear(sizes.hidden, sizes.hidden, bias=bias)

    def forward(self, x: Tensor, table: Tensor | None) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.size)) for part in (self.q, self.k, self.v))
        if table is not None:
            q, k = _rotated(q, table), _rotated(k, table)
        y, _ = _flash(q, k, v)
        return self.out(y.flatten(2))


def _rotated(x: Tensor, table: Tensor) -> Tensor:
    """Return heads rotated by position, in float32 as torchtitan does."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * table[None, :, None, :]).flatten(3).to(x.dtype)


class _Mlp(nn.Module):
    def __init__(self, sizes: Sizes, approximate: str) -> None:
        super().__init__()
        self.approximate = approximate
        self.up, self.down = nn.Linear(sizes.hidden, sizes.ffn), nn.Linear(sizes.ffn, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x), approximate=self.approximate))


class _GatedMlp(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(sizes.hidden, sizes.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.ffn, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def _norm(sizes: Sizes) -> nn.Module:
    return _RMSNorm(sizes.hidden) if sizes.kind == "llama" else nn.LayerNorm(sizes.hidden)


class _Block(nn.Module):
    """A block with its norms before (all but BERT) or behind attention and MLP."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.post = sizes.kind == "bert"
        self.attn_norm, self.mlp_norm = _norm(sizes), _norm(sizes)
        self.attn = _Attention(sizes, bias=sizes.kind != "llama")
        self.mlp = _GatedMlp(sizes) if sizes.kind == "llama" else _Mlp(sizes, "tanh" if sizes.kind == "gpt" else "none")

    def forward(self, x: Tensor, table: Tensor | None) -> Tensor:
        if self.post:
            x = self.attn_norm(x + self.attn(x, table))
            return self.mlp_norm(x + self.mlp(x))
        x = x + self.attn(self.attn_norm(x), table)
        return x + self.mlp(self.mlp_norm(x))


class _Embedding(nn.Module):
    """Tokens with learned positions, or patches of images with a class token."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.kind = sizes.kind
        if sizes.kind == "vit":
            self.patches = nn.Conv2d(3, sizes.hidden, sizes.patch, sizes.patch)
            self.token = nn.Parameter(torch.empty(1, 1, sizes.hidden))
        else:
            self.tokens = nn.Embedding(sizes.vocab, sizes.hidden)
        if sizes.kind != "llama":
            self.positions = nn.Parameter(torch.empty(sizes.seq, sizes.hidden))
        if sizes.kind == "bert":
            self.segments = nn.Parameter(torch.empty(2, sizes.hidden))
            self.norm = nn.LayerNorm(sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "vit":
            x = self.patches(x).flatten(2).transpose(1, 2)
            return torch.cat([self.token.expand(len(x), 1, -1), x], dim=1) + self.positions
        x = self.tokens(x)
        if self.kind == "llama":
            return x
        x = x + self.positions[: x.shape[1]]
        return self.norm(x + self.segments[0]) if self.kind == "bert" else x


class _Head(nn.Module):
    """What follows the blocks, up to the logits."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.kind = sizes.kind
        if sizes.kind == "bert":
            self.dense = nn.Linear(sizes.hidden, sizes.hidden)
        self.norm = _norm(sizes)
        self.out = nn.Linear(sizes.hidden, sizes.vocab, bias=sizes.kind in ("bert", "vit"))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "bert":
            x = functional.gelu(self.dense(x))
        x = self.norm(x)
        return self.out(x[:, 0] if self.kind == "vit" else x)


class Transformer(nn.Module):
    """A model of the zoo as a torch module; logits have a matrix of their own."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed = _Embedding(sizes)
        self.blocks = nn.ModuleList(_Block(sizes) for _ in range(sizes.layers))
        self.head = _Head(sizes)
        if sizes.kind == "llama":
            table = torch.empty(sizes.seq, sizes.hidden // sizes.heads // 2, dtype=torch.complex64)
            self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        x = self.embed(x)
        table = self.table if self.sizes.kind == "llama" else None
        for block in self.blocks:
            x = block(x, table)
        return self.head(x)


_MATRIX_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.linear.default,
    torch.ops.autopar_tests.flash.default,
}


def _save_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _MATRIX_PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def _by_op() -> Any:
    """Return contexts that keep attention and the first, third, ... product of a block, counted anew in each run."""
    products = {True: 0, False: 0}

    def keep(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op == torch.ops.aten.mm.default:
            products[ctx.is_recompute] += 1
        counted = op == torch.ops.aten.mm.default and products[ctx.is_recompute] % 2 == 1
        kept = counted or op == torch.ops.autopar_tests.flash.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(keep)


def _checkpointed(block: nn.Module, recompute: str) -> nn.Module:
    if recompute == "full":
        return checkpoint_wrapper(block, preserve_rng_state=False)
    contexts = _by_op if recompute == "by op" else partial(create_selective_checkpoint_contexts, _save_products)
    return checkpoint_wrapper(block, preserve_rng_state=False, context_fn=contexts)


def _tensor_parallel(model: Transformer, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Split a model over tensor-parallel devices, logits and loss along the vocabulary."""
    inside = Shard(1) if sequence_parallel else Replicate()
    whole = {"input_layouts": (inside,), "desired_input_layouts": (Replicate(),)}
    norm = SequenceParallel if sequence_parallel else None
    embedding = {"embed.tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=inside)}
    head: dict[str, Any] = {
        "head.out": ColwiseParallel(input_layouts=inside, output_layouts=Shard(-1)),
    }
    if norm:
        head["head.norm"] = norm()
    parallelize_module(model, mesh, embedding | head)
    for block in model.blocks:
        plan: dict[str, Any] = {
            "attn": PrepareModuleInput(input_layouts=(inside, None), desired_input_layouts=(Replicate(), None)),
            "mlp": PrepareModuleInput(**whole),
            "attn.out": RowwiseParallel(output_layouts=inside),
            "mlp.down": RowwiseParallel(output_layouts=inside),
        }
        plan |= dict.fromkeys(("attn.q", "attn.k", "attn.v", "mlp.up"), None)
        if hasattr(block.mlp, "gate"):
            plan["mlp.gate"] = None
        plan = {name: ColwiseParallel() if style is None else style for name, style in plan.items()}
        if norm:
            plan |= {"attn_norm": norm(), "mlp_norm": norm()}
        parallelize_module(block, mesh, plan)


@contextmanager
def _real_meshes() -> Iterator[None]:
    """Let FSDP put meshes together on real tensors, which it reads."""
    concatenate = DeviceMesh._concatenate

    def on_real_tensors(meshes: list[DeviceMesh]) -> DeviceMesh:
        with unset_fake_temporarily():
            return concatenate(meshes)

    with mock.patch.object(DeviceMesh, "_concatenate", staticmethod(on_real_tensors)):
        yield


@contextmanager
def fake_devices(count: int) -> Iterator[None]:
    """Be rank 0 of a process group of `count` devices that sends nothing."""
    dist.init_process_group(backend="fake", world_size=count, rank=0, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class Tracked:
    """What a tracker saw.

    Attributes:
        peak: Bytes of the fullest moment.
        parts: The same by kind of reference, in the tracker's words.
    """

    peak: float
    parts: dict[str, float]


def track(sizes: Sizes, layout: Layout, samples: int) -> Tracked:
    """Return the peak memory of the second step of training on rank 0.

    Args:
        sizes: The model.
        layout: The devices.
        samples: Sequences of a microbatch on a device.
    """
    mesh_sizes = {name: size for name, size in (("dp", layout.fsdp), ("tp", layout.tp)) if size > 1}
    with ExitStack() as stack:
        stack.enter_context(fake_devices(layout.fsdp * layout.tp))
        mesh: Any = None
        if mesh_sizes:
            mesh = init_device_mesh("cpu", tuple(mesh_sizes.values()), mesh_dim_names=tuple(mesh_sizes))
        stack.enter_context(_real_meshes())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        model = Transformer(sizes)
        if layout.tp > 1:
            _tensor_parallel(model, mesh["tp"], layout.sequence_parallel)
        if layout.recompute != "none":
            for index, block in enumerate(model.blocks):
                model.blocks[index] = _checkpointed(block, layout.recompute)
        if layout.fsdp > 1:
            numbers = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if layout.bf16 else MixedPrecisionPolicy()
            for unit in (model.embed, *model.blocks):
                fully_shard(unit, mesh=mesh["dp"], mp_policy=numbers, reshard_after_forward=layout.reshard)
            fully_shard(model.head, mesh=mesh["dp"], mp_policy=numbers, reshard_after_forward=False)
            fully_shard(model, mesh=mesh["dp"], mp_policy=numbers, reshard_after_forward=layout.reshard)
        # Plain tensors and shards are updated by kernels of their own.
        split = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
        plain = [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]
        groups = [{"params": group} for group in (split, plain) if group]
        optimizer = torch.optim.AdamW(groups, foreach=False, fused=True)
        if sizes.kind == "vit":
            x = torch.empty(samples, 3, sizes.image, sizes.image)
            labels = torch.empty(samples, dtype=torch.int64)
        else:
            x = torch.empty(samples, sizes.seq, dtype=torch.int64)
            labels = torch.empty(samples, sizes.seq, dtype=torch.int64)

        def step() -> None:
            logits = model(x)
            rows = logits.flatten(0, -2).float()
            loss = (
                _VocabularyLoss.apply(rows, labels.flatten())
                if layout.tp > 1
                else functional.cross_entropy(rows, labels.flatten())
            )
            del rows
            del logits
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        step()  # fills the caches of DTensor, and makes the state of the optimizer
        if layout.fsdp > 1:
            tracker: MemTracker = FSDPMemTracker(model, optimizer)
            tracker.track_inputs((x, labels))
        else:
            tracker = MemTracker()
            tracker.track_external(model, optimizer, x, labels)
        with tracker:
            step()
        snapshot = tracker.get_tracker_snapshot("peak")
    parts: dict[str, float] = defaultdict(float)
    for found in snapshot.values():
        for key, size in found.items():
            parts[str(getattr(key, "value", key))] += size
    total = parts.pop("Total")
    return Tracked(total, dict(parts))

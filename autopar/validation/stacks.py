"""Which software stack a framework on a device is, and what its kernels are: a table, first match first.

Losses are Megatron-LM's in float32, where nothing else is known. Eager PyTorch and torchtitan before 2025 run
`torch.nn.functional.cross_entropy` kernel by kernel; NVIDIA's recipes since 2024 (`cross_entropy_loss_fusion`),
compiled losses of later torchtitan and InternEvo's flash-attn loss are fused.

Experts: `GroupedLinear` of Transformer Engine runs a cuBLAS product per expert; recipes say where Megatron-Bridge has
fused kernels, from 26.06 on (NVIDIA-NeMo/Megatron-Bridge, issue 2885). All else here has grouped kernels (DeepGEMM,
`torch._grouped_mm`, Megablox).

Dispatch: NVIDIA's recipes of 2026 send a token once per node on every device (flex dispatcher with DeepEP or HybridEP:
NVIDIA-NeMo/Megatron-Bridge, deepseek_workload_base_configs.py and qwen3_workload_base_configs.py), and so do its stacks
by default; recipes of older versions, and those that name `alltoall`, say so.

Kernels of attention: Megatron-LM and its descendants ran batched products with a fused masked softmax until
FlashAttention came into Megatron-Core (2023), and so did OneFlow on V100, which FlashAttention does not support; all
else here runs fused attention. Element-wise chains (bias, dropout
and residual; bias and GELU) are one kernel in Megatron's descendants and in what torch.compile makes; eager FSDP runs
one kernel per op.
"""

import re
from dataclasses import replace
from typing import NamedTuple

from autopar.cost import Stack, bundled_stacks
from autopar.cost.reserve import GAPS
from autopar.cost.stack import IDEAL, Attention, Dispatch, Experts, Fusion, Loss, Selective


class Known(NamedTuple):
    """A stack: patterns of framework (with "zero=3" behind it) and device, name, kernels, and its presets.

    A fit also takes the rows of the stacks that are `pooled`: where few rows of a software are known, what all of its
    relatives have in common is what can be told. Its `relatives` are the same software on devices of its kind: the
    rows of all are fitted together first, and its scalars are drawn towards that fit and not towards their defaults.
    OneFlow lays out all memory of a step when it compiles it, so that there are no `gaps`.
    """

    framework: str
    device: str
    name: str
    attention: Attention
    fusion: Fusion
    clusters: tuple[str, ...]
    pooled: tuple[str, ...] = ()
    loss: Loss = "float32"
    selective: Selective = "cheap"
    experts: Experts = "grouped"
    relatives: tuple[str, ...] = ()
    dispatch: Dispatch = "all-to-all"
    gaps: float = GAPS

    @property
    def unfitted(self) -> Stack:
        """The stack with its kernels and nothing fitted.

        FSDP frees sums of gradients after the update; torchtitan and MaxText gather keys and values by default
        (`context_parallel_rotate_method`, `context_parallel_strategy`), DeepSpeed exchanges heads.
        ZeRO-3 of DeepSpeed gathers parameter by parameter: with a gather per block, steps of 384 to 1,536 A100 are 9 to
        47 % too short.
        """
        fsdp = self.name.startswith("fsdp")
        gathers = fsdp or self.name.startswith("maxtext")
        return Stack(
            self.name,
            self.attention,
            self.fusion,
            clusters=self.clusters,
            loss=self.loss,
            gradients="made" if fsdp else "kept",
            context="gather" if gathers else "ulysses" if "deepspeed" in self.name else "ring",
            selective=self.selective,
            experts=self.experts,
            dispatch=self.dispatch,
            gaps=self.gaps,
            gathers="parameter" if self.name.startswith("deepspeed-zero3") else "block",
        )


_A100 = ("a100", "a100-40", "a100-4hdr", "a100-opa", "a100-roce", "a100-4x100")
_H100 = ("h100", "h100-2x400", "h100-96", "h200")
_B200 = ("b200", "gb200")
_V100 = ("v100", "v100-aws", "v100-dgx2")
_TPU = ("tpu-v5p",)
"""The slices that rows of MaxText with stated degrees ran on."""
_OF_CORE = ("megascale-a100", "megatron-ci-a100", "internevo-a100")
"""Software on A100 that is of Megatron-Core's kind: flash attention and fused chains."""


def _compiled(
    framework: str, device: str, name: str, clusters: tuple[str, ...], loss: Loss = "eager",
    selective: Selective = "cheap",
) -> Known:  # fmt: skip
    """Return an entry of FSDP2 under torch.compile."""
    return Known(framework, device, name, "fused", "chains", clusters, loss=loss, selective=selective)


def _core(device: str, name: str, clusters: tuple[str, ...], relatives: tuple[str, ...] = ()) -> Known:
    """Return an entry of Megatron-Core with NVIDIA's recipes of 2026.

    Losses are fused, every expert has a cuBLAS product, and a token is sent once per node.
    """
    return Known(
        r"mega", device, name, "fused", "chains", clusters, loss="fused", experts="each", relatives=relatives,
        dispatch="per-node",
    )  # fmt: skip


STACKS = (
    Known(r"zero-bubble", r"A100", "zero-bubble-a100", "unfused", "chains", _A100),
    Known(r"megatron-deepspeed.*bloom", r"A100", "bloom-a100", "unfused", "chains", _A100),
    Known(r"megatron-deepspeed", r"A100", "megatron-deepspeed-a100", "unfused", "chains", _A100),
    Known(r"deepspeed.* zero=3", r"A100", "deepspeed-zero3-a100", "unfused", "chains", _A100),
    Known(r"megascale|megatron-lm \(", r"A100", "megascale-a100", "fused", "chains", _A100),
    Known(r"megatron-lm", r"A100", "megatron-a100", "unfused", "chains", _A100),
    Known(r"megatron-lm", r"V100", "megatron-v100", "unfused", "chains", _V100),
    Known(r"oneflow", r"V100", "oneflow-v100", "unfused", "chains", _V100, gaps=0.0),
    Known(r"alpa", r"V100", "alpa-v100", "unfused", "chains", _V100),
    _compiled(r"torchtitan compile", r"H200", "fsdp-compile-h100", _H100, loss="fused", selective="alternate"),
    _compiled(r"torchtitan", r"H[12]00", "fsdp-compile-h100", _H100, selective="alternate"),
    _compiled(r"compile", r"H[12]00", "fsdp-compile-h100", _H100),
    _compiled(r"torchtitan", r"A100", "fsdp-compile-a100", _A100, selective="alternate"),
    _compiled(r"compile", r"A100", "fsdp-compile-a100", _A100),
    _compiled(r"torchtitan", r"B200", "fsdp-compile-b200", _B200, loss="fused", selective="alternate"),
    Known(r"fsdp|composer", r"A100", "fsdp-eager-a100", "fused", "none", _A100, loss="eager"),
    Known(r"fsdp|composer", r"H[12]00", "fsdp-eager-h100", "fused", "none", _H100, loss="eager"),
    Known(r"internevo", r"A100", "internevo-a100", "fused", "chains", _A100, loss="fused"),
    Known(r"functional test", r"A100", "megatron-ci-a100", "fused", "chains", _A100),
    Known(r"functional test", r"H100", "megatron-ci-h100", "fused", "chains", _H100),
    _core(r"H[12]00", "megatron-h100", _H100),
    Known(r"mega", r"A100", "megatron-core-a100", "fused", "chains", _A100, _OF_CORE, experts="each"),
    _core(r"B300", "megatron-b300", ("b300", "gb300")),
    _core(r"GB200", "megatron-gb200", ("gb200",), ("megatron-b200",)),
    _core(r"B200", "megatron-b200", ("b200",), ("megatron-gb200",)),
    Known(r"maxtext|paxml", r"H[12]00", "maxtext-h100", "fused", "chains", _H100),
    Known(r"maxtext", r"TPU", "maxtext-tpu", "fused", "chains", _TPU),
    Known(r"primus|mega", r"MI3", "primus-mi300x", "fused", "chains", ("mi300x", "mi325x", "mi355x"), loss="fused"),
)


def meant_stack(framework: str, device: str, zero: int = 0) -> Stack:
    """Return the stack that is meant for a framework on a device, with its kernels and nothing fitted.

    The ZeRO stage tells which part of a framework ran where it has several.

    >>> meant_stack("Megatron-DeepSpeed (PyTorch 2.0.1)", "A100-SXM-80GB").name
    'megatron-deepspeed-a100'
    """
    text = f"{framework} zero={zero}"
    for known in STACKS:
        if re.search(known.framework, text, re.IGNORECASE) and re.search(known.device, device, re.IGNORECASE):
            return known.unfitted
    return IDEAL


def stack_for(framework: str, device: str, zero: int = 0) -> Stack:
    """Return the stack a framework on a device is predicted with.

    Its scalars are those of the bundled stack of its name, if that has been calibrated; its kernels are those of the
    table, where versions of one framework differ.
    """
    meant = meant_stack(framework, device, zero)
    bundled = bundled_stacks().get(meant.name, meant)
    return replace(meant, scalars=bundled.scalars, fit=bundled.fit, gaps=bundled.gaps, outside=bundled.outside)

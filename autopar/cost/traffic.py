"""Bytes an op moves through device memory, on local shapes.

Every kernel reads its inputs and writes its outputs once. What differs is in tables: views move nothing, indexing
touches only the rows it selects, attention with a window or chunks only the keys its queries see, attention to a cache
writes the keys of its queries there, a loss in float32 copies its logits, scans hand states from one of their kernels
to the next, and some classes of kernels reach less of the memory bandwidth than a copy does. A transposition is free if
it leaves rows together, because kernels follow strides from row to row (attention takes its heads like that), or if it
swaps the last two dims, because matrix products read either order.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from autopar.cost.arrays import FloatArray, IntArray, num_elements
from autopar.cost.attention import LIMITED_KINDS, keys_read
from autopar.cost.scans import SCAN_KERNELS, scan_traffic
from autopar.cost.stack import Loss
from autopar.ir.caches import WRITTEN_SLOTS
from autopar.ir.graph import Op

VIEWS = frozenset(
    {"Constant", "Flatten", "Identity", "Reshape", "Shape", "Size", "Squeeze", "Unsqueeze", "autopar::ExpertRows"}
)
"""Kinds that rename or describe their input and launch nothing."""

_GATHERS = ("Gather", "GatherElements", "GatherND")
INDEXED = frozenset({*_GATHERS, *(f"autopar::{kind}Part" for kind in _GATHERS), "Slice"})
"""Kinds that read from their first input only what they write to their first output."""

LOGIT_BYTES: Mapping[str, float] = {"autopar::CrossEntropyStats": 16.0, "autopar::CrossEntropyGrad": 10.0}
"""Bytes per logit of a loss that is computed in float32 kernel by kernel, as Megatron-LM does: the logits are copied to
float32, shifted by the largest, exponentiated and summed; the gradient is written in float32 and rounded. With the
reading for the largest that makes 28; published step times ask for 24 to 32."""

FLOAT32 = 4.0
"""Bytes of a number in which losses are computed."""

HEAD_GRAD, HEAD_ROW_MAX = "autopar::HeadGrad", "autopar::HeadRowMax"
"""Heads with their cross-entropy: the gradient, and the largest logits, which the kernel of the sums finds."""


def loss_bytes(kind: str, loss: Loss, element: float, *, splits: bool = False) -> float:
    """Return the bytes per logit that a cross-entropy holds beside its logits and their gradient.

    Of the op that reads the logits these are kept for its gradient: probabilities in float32 in place of the logits.
    Of the gradient they are there while it runs: in eager PyTorch the gradients of log-probabilities and of logits,
    both in float32, before the last is rounded to the type of the logits; where devices share the classes
    (`loss_parallel` of torch) gradient of the labels, probabilities, their sum and its product with the gradient.

    Args:
        kind: Kind of the op.
        loss: What the stack runs.
        element: Bytes of a logit.
        splits: Whether devices share the classes.

    >>> loss_bytes("autopar::CrossEntropyStats", "float32", 2.0), loss_bytes("autopar::CrossEntropyGrad", "eager", 2.0)
    (2.0, 6.0)
    """
    if loss == "fused":
        return 0.0
    if kind == "autopar::CrossEntropyStats":
        return max(0.0, FLOAT32 - element)
    return (3 if splits else 2) * FLOAT32 - element if loss == "eager" else 0.0


NORMS = frozenset(
    {
        "LayerNormalization", "RMSNormalization", "GroupNormalization", "InstanceNormalization", "BatchNormalization",
        "autopar::BatchNorm", "autopar::BatchNormGrad", "autopar::BatchNormGradMeans", "autopar::BatchNormGradStats",
        "autopar::BatchNormMeans", "autopar::BatchNormStats",
        "autopar::GroupNormalizationGrad", "autopar::LayerNormalizationGrad", "autopar::RMSNormalizationGrad",
    }
)  # fmt: skip
"""Kinds that go over every row twice."""

ACTIVATIONS = frozenset(
    {
        "Celu", "Elu", "Erf", "Gelu", "HardSwish", "Mish", "Selu", "Sigmoid", "Softplus", "Swish", "Tanh",
        "autopar::CeluGrad", "autopar::EluGrad", "autopar::ErfGrad", "autopar::GeluGrad", "autopar::GeluTanhGrad",
        "autopar::MishGrad", "autopar::SeluGrad", "autopar::SigmoidGrad", "autopar::SwishGrad", "autopar::TanhGrad",
    }
)  # fmt: skip
"""Kinds that compute an exponential per element."""

COMPUTING = frozenset(
    {
        "ConvInteger", "DFT", "DeformConv", "Det", "GRU", "GridSample", "If", "LSTM", "Loop", "MatMulInteger",
        "MaxRoiPool", "NonMaxSuppression", "NonZero", "QLinearConv", "QLinearMatMul", "RNN", "RoiAlign", "STFT", "Scan",
        "TopK", "Unique",
    }
)  # fmt: skip
"""Kinds that compute more than they move, sort, or run step by step, and have no formula of their own."""

NORM_SHARE = 0.7
ACTIVATION_SHARE = 0.62
PLAIN_SHARE = 1.1
CAST_SHARE = 0.65 / 0.85
"""Share of kernels that quantize rows of experts along both dims: 272 MB in 52.3 us on B200, 0.65 of the data sheet's
bandwidth, of which copies are taken to reach 0.85 (Transformer Engine's casts to MXFP8 as timed in
ROCm/TransformerEngine, pull request 598)."""
PERMUTE_SHARE = 0.6
"""Share of kernels that sort tokens by expert: 0.50 and 0.51 of the data sheet's bandwidth on B200, in either pass
(MooreThreads/SimuMax, configs/system/b200_bf16_ceperm.json), whose copies are taken to reach 0.85."""


def is_of_experts(kind: str) -> bool:
    """Whether how much a kind of op does depends on the tokens that chose an expert.

    >>> [is_of_experts(kind) for kind in ("autopar::ExpertDispatch", "autopar::GroupedMatMulGrad", "TopK")]
    [True, True, False]
    """
    return kind.startswith(("autopar::Expert", "autopar::GroupedMatMul"))


def bandwidth_share(kind: str) -> float:
    """Return the share of the effective memory bandwidth that a kind of kernel reaches."""
    if is_of_experts(kind):
        return PERMUTE_SHARE
    if kind in NORMS:
        return NORM_SHARE
    return ACTIVATION_SHARE if kind in ACTIVATIONS else PLAIN_SHARE


def is_guessed(kind: str) -> bool:
    """Whether the bytes of a kind of op, all it is priced by, are not what it takes: kinds of other domains included.

    >>> [is_guessed(kind) for kind in ("Add", "autopar::ErfGrad", "LSTM", "com.microsoft::MatMulNBits")]
    [False, False, True, True]
    """
    domain, _, name = kind.rpartition("::")
    return domain not in ("", "autopar") or name.removesuffix("Grad") in COMPUTING


def _keeps_rows(op: Op, rank: int) -> bool:
    """Whether a transposition leaves rows together, or swaps the last two dims and nothing else."""
    order = op.attr("perm")
    if not isinstance(order, tuple):
        return rank == 2  # the default reverses all dims
    return order[-1] == rank - 1 or order == (*range(rank - 2), rank - 1, rank - 2)


def is_view(op: Op, rank: int) -> bool:
    """Whether an op whose first input has `rank` dims moves no data and launches no kernel.

    >>> is_view(Op("t", "Transpose", ("x",), ("y",), (("perm", (0, 2, 1)),)), rank=3)
    True
    """
    return op.kind in VIEWS or (op.kind == "Transpose" and rank >= 2 and _keeps_rows(op, rank))


def op_bytes(
    op: Op,
    inputs: Sequence[IntArray | None],
    outputs: Sequence[IntArray | None],
    element_bytes: Mapping[str, float],
    unread: Collection[int] = (),
    unwritten: Collection[int] = (),
) -> FloatArray:
    """Return the bytes one device reads and writes for each strategy.

    Args:
        op: The operation.
        inputs: Local shape arrays (n, rank) of its inputs; None where absent.
        outputs: Local shape arrays (n, rank) of its outputs; None where absent.
        element_bytes: Bytes per element by value name.
        unread: Inputs, by index, that need not be read.
        unwritten: Outputs, by index, that need not be written.

    Returns:
        (n,) bytes; 0 for a view.
    """
    first = next((shape for shape in inputs if shape is not None), None)
    logit_bytes = LOGIT_BYTES.get(op.kind)
    if logit_bytes is not None and first is not None:
        return num_elements(first) * logit_bytes
    total = np.zeros(next((len(shape) for shape in (*outputs, *inputs) if shape is not None), 0))
    if op.kind == HEAD_ROW_MAX:
        unread = range(len(inputs))
    if is_view(op, 0 if first is None else first.shape[1]):
        return total
    if op.kind in SCAN_KERNELS:
        total += scan_traffic(op, inputs, element_bytes[op.inputs[0]])
    for index, (name, shape) in enumerate(zip(op.inputs, inputs, strict=True)):
        if not name or shape is None or index in unread:
            continue
        if index == 0 and op.kind in INDEXED and outputs[0] is not None:
            shape = outputs[0]
        nbytes = num_elements(shape) * element_bytes[name]
        if index in (1, 2) and op.kind in LIMITED_KINDS:
            nbytes = nbytes * keys_read(op, inputs) / np.maximum(shape[:, -2], 1)
        if index in WRITTEN_SLOTS.get(op.kind, ()):
            nbytes = 2 * nbytes  # behind what the cache holds
        total += nbytes
    for index, (name, shape) in enumerate(zip(op.outputs, outputs, strict=True)):
        if name and shape is not None and index not in unwritten:
            total += num_elements(shape) * element_bytes[name]
    return total

"""Scans over tokens on local shapes, as the kernels of their authors compute them.

Those whose states decay by a number per token and head are computed by chunks of tokens.

Within a chunk of c tokens the scan is products of chunk by chunk, as attention is; between chunks states are handed on,
made and read by products of chunk by state. Tensors between the kernels of one op go through memory.

State-space scan (`autopar::StateSpaceScan`, Dao and Gu 2024, section 6; kernels `mamba_chunk_scan_combined` of
state-spaces/mamba), c = 256, for heads of P channels and N numbers of state, in groups that share B and C:

    C B^T, of a group            (c, c/2, N)      blocks above the diagonal are left out
    its product with x           (c, P, c/2)
    states of chunks             (N, P, c)
    results of earlier chunks    (c, P, N)

The gradient makes C B^T and the states again, and has two products of each of the four.

Gated delta rule (`autopar::GatedDeltaRule`, Yang et al. 2024, Gated Delta Networks, section 3.3; kernels
`chunk_gated_delta_rule` of fla-org/flash-linear-attention), c = 64, for heads of K and V channels, keys repeated for
each head: products of whole chunks, as a chunk is one tile; the inverse of a triangular matrix counts a third of a
product of its size.

Selective scan (`autopar::SelectiveScan`, Gu and Dao 2023, section 3.3.2; kernels `selective_scan_fwd_kernel` and
`selective_scan_bwd_kernel` of state-spaces/mamba): each number of a state has a decay of its own, so that there are no
matrix products. One kernel reads its inputs, keeps states on chip and computes on vector units; it keeps the state
behind every 2048 tokens. Per number of state and token, forward: 9 FLOPs, in the time of 16 multiply-adds, of which the
exponential takes 8 and the products and the parallel scan the others. The gradient computes the states again and takes
three times as long.

A step of decoding goes from token to token in one kernel (`selective_state_update` of state-spaces/mamba,
`fused_recurrent_gated_delta_rule` of flash-linear-attention): what it does is arithmetic on the numbers of states,
behind their bytes, which are read and written once. Per number of state and token, multiplications and additions of the
recurrence: 5 of the state-space scan, 9 of the selective scan with its exponential, 7 of the gated delta rule.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from autopar.cluster.records import Device
from autopar.cost.arrays import FloatArray, Product, Shapes, num_elements, shape_of
from autopar.ir.graph import Op

STATE_SPACE_CHUNK = 256.0  # tokens; default of state-spaces/mamba and of its models
DELTA_CHUNK = 64.0  # tokens; fixed in flash-linear-attention
SELECTIVE_CHUNK = 2048.0  # tokens between states that selective_scan_fwd_kernel keeps
FLOAT32 = 4.0
_STATE_SPACE, _DELTA, _SELECTIVE = "autopar::StateSpaceScan", "autopar::GatedDeltaRule", "autopar::SelectiveScan"
_STATE_SPACE_GRAD, _DELTA_GRAD, _SELECTIVE_GRAD = (f"{kind}Grad" for kind in (_STATE_SPACE, _DELTA, _SELECTIVE))

SCAN_KERNELS: Mapping[str, int] = {
    _STATE_SPACE: 5, _STATE_SPACE_GRAD: 14, _DELTA: 8, _DELTA_GRAD: 11, _SELECTIVE: 1, _SELECTIVE_GRAD: 1
}  # fmt: skip
"""Kernels of each op: cumulated decays, states, their passing on, C B^T, results; their gradients and recomputation.
For the delta rule: norms of queries and keys, decays, K K^T, its inverse, its products, states, results; and so on."""
_SELECTIVE_FLOPS: Mapping[str, float] = {_SELECTIVE: 9.0, _SELECTIVE_GRAD: 18.0}
"""Per number of state and token: the forward as its authors count (state-spaces/mamba, issue 110), twice the gradient.
"""
_SELECTIVE_SLOTS: Mapping[str, float] = {_SELECTIVE: 16.0, _SELECTIVE_GRAD: 48.0}
"""Multiply-adds that take as long, per number of state and token; read off the kernels, not fitted to timings. An
exponential takes 8: units of special functions are an eighth of those of float32 (NVIDIA H100 whitepaper)."""
_STEP_FLOPS: Mapping[str, float] = {
    "autopar::CachedStateSpaceScan": 5.0, "autopar::CachedSelectiveScan": 9.0, "autopar::CachedGatedDeltaRule": 7.0
}  # fmt: skip
"""Per number of state and token of a step of decoding; its first input is the state."""
_HALF_BY_SINGLE = 8.0
"""Peak of matrix units in the fewest FLOP/s by that of vector units, of devices that do not state the latter."""


@dataclass(frozen=True, slots=True, eq=False)
class _Sizes:
    """Sizes of a scan; arrays (n,).

    Attributes:
        chunk: Tokens of a chunk.
        chunks: Samples x chunks x heads, a real number.
        shared: Samples x chunks x groups of heads.
        rows: Size of a state along what groups share.
        columns: Size of a state along the channels of a head.
    """

    chunk: FloatArray
    chunks: FloatArray
    shared: FloatArray
    rows: FloatArray
    columns: FloatArray


def _sizes(inputs: Shapes, data: int, shared: int, chunk: float) -> _Sizes:
    """Return the sizes of a scan of which one input is the data of heads, another what groups share."""
    heads, groups = (shape_of(inputs, index).astype(np.float64) for index in (data, shared))
    tokens = np.minimum(chunk, heads[:, 1])
    num_chunks = heads[:, 0] * heads[:, 1] / np.maximum(tokens, 1.0)
    return _Sizes(tokens, num_chunks * heads[:, 2], num_chunks * groups[:, 2], groups[:, 3], heads[:, 3])


def _sizes_of(op: Op, inputs: Shapes) -> _Sizes:
    if op.kind in (_STATE_SPACE, _STATE_SPACE_GRAD):
        return _sizes(inputs, 0, 3, STATE_SPACE_CHUNK)
    return _sizes(inputs, 2, 1, DELTA_CHUNK)


def _state_space(op: Op, inputs: Shapes, outputs: Shapes) -> list[Product]:
    s = _sizes_of(op, inputs)
    half = s.chunk / 2
    return [
        Product(s.shared, s.chunk, half, s.rows),
        Product(s.chunks, s.chunk, s.columns, half),
        Product(s.chunks, s.rows, s.columns, s.chunk),
        Product(s.chunks, s.chunk, s.columns, s.rows),
    ]


def _state_space_grad(op: Op, inputs: Shapes, outputs: Shapes) -> list[Product]:
    s = _sizes_of(op, inputs)
    half = s.chunk / 2
    scores, _, states, _ = _state_space(op, inputs, outputs)
    return [
        scores, states,
        Product(s.shared, s.chunk, s.rows, half), Product(s.shared, half, s.rows, s.chunk),  # of B and C, by C B^T
        Product(s.chunks, s.chunk, half, s.columns), Product(s.chunks, half, s.columns, s.chunk),  # of C B^T and x
        Product(s.chunks, s.chunk, s.columns, s.rows), Product(s.chunks, s.chunk, s.rows, s.columns),  # of x and B
        Product(s.chunks, s.rows, s.columns, s.chunk), Product(s.chunks, s.chunk, s.rows, s.columns),  # of states and C
    ]  # fmt: skip


def _numbers_of_states(inputs: Shapes) -> FloatArray:
    """Return tokens times numbers of state of a selective scan, of all channels."""
    return num_elements(shape_of(inputs, 0)) * shape_of(inputs, 2)[:, 1]


def _selective(op: Op, inputs: Shapes, outputs: Shapes) -> list[Product]:
    """What vector units do, as a product of so many FLOPs."""
    one = np.ones(len(shape_of(inputs, 0)))
    return [Product(_numbers_of_states(inputs), one, one, _SELECTIVE_FLOPS[op.kind] / 2 * one, on_vectors=True)]


def _step(op: Op, inputs: Shapes, outputs: Shapes) -> list[Product]:
    """What vector units do in a step of decoding, as a product of so many FLOPs."""
    state = shape_of(inputs, 0)
    numbers = num_elements(state) * shape_of(outputs, 0)[:, 1]
    one = np.ones(len(state))
    return [Product(numbers, one, one, _STEP_FLOPS[op.kind] / 2 * one, on_vectors=True)]


def scan_vector_seconds(op: Op, inputs: Shapes, device: Device) -> FloatArray | float:
    """Return the seconds that vector units need for a selective scan or its gradient, (n,); 0 for other ops.

    Args:
        op: The operation.
        inputs: Local shape arrays of its inputs.
        device: What computes it.
    """
    slots = _SELECTIVE_SLOTS.get(op.kind)
    if slots is None:
        return 0.0
    peaks = dict(device.peaks)
    rate = peaks.get("single", min(peaks.values()) / _HALF_BY_SINGLE)
    return 2.0 * slots * _numbers_of_states(inputs) / rate


def _delta(op: Op, inputs: Shapes, outputs: Shapes) -> list[Product]:
    s = _sizes_of(op, inputs)
    inverse = [Product(s.chunks, s.chunk, s.chunk, s.chunk / 3)]
    return [_scores(s), *inverse, *_written(s), *_passed_on(s), _scores(s), _read(s), _of_channels(s)]


def _delta_grad(op: Op, inputs: Shapes, outputs: Shapes) -> list[Product]:
    """Products of each kernel of `chunk_gated_delta_rule_bwd` in turn."""
    s = _sizes_of(op, inputs)
    by_values = Product(s.chunks, s.chunk, s.chunk, s.columns)
    of_keys = Product(s.chunks, s.chunk, s.rows, s.chunk)
    from_states = Product(s.chunks, s.chunk, s.rows, s.columns)
    square = Product(s.chunks, s.chunk, s.chunk, s.chunk)
    return [
        *_written(s), *_passed_on(s),
        _scores(s), _of_channels(s),
        _read(s), _made(s), _made(s),
        _scores(s), by_values, *[from_states] * 3, *[of_keys] * 2,
        *_written(s), _scores(s), by_values, *[square] * 2, _scores(s), *[of_keys] * 2,
    ]  # fmt: skip


def _scores(s: _Sizes) -> Product:
    """Products of tokens with tokens of a chunk, over the channels of keys."""
    return Product(s.chunks, s.chunk, s.chunk, s.rows)


def _of_channels(s: _Sizes) -> Product:
    """What tokens of a chunk read of each other's values."""
    return Product(s.chunks, s.chunk, s.columns, s.chunk)


def _written(s: _Sizes) -> tuple[Product, ...]:
    """Keys and values of a chunk behind the inverse of its triangular matrix."""
    return Product(s.chunks, s.chunk, s.rows, s.chunk), _of_channels(s)


def _read(s: _Sizes) -> Product:
    """What tokens read of a state."""
    return Product(s.chunks, s.chunk, s.columns, s.rows)


def _made(s: _Sizes) -> Product:
    """What tokens add to a state."""
    return Product(s.chunks, s.rows, s.columns, s.chunk)


def _passed_on(s: _Sizes) -> tuple[Product, ...]:
    """A state from one chunk to the next."""
    return _read(s), _made(s)


SCAN_PRODUCTS: Mapping[str, Callable[[Op, Shapes, Shapes], list[Product]]] = {
    _STATE_SPACE: _state_space,
    _STATE_SPACE_GRAD: _state_space_grad,
    _DELTA: _delta,
    _DELTA_GRAD: _delta_grad,
    _SELECTIVE: _selective,
    _SELECTIVE_GRAD: _selective,
    **dict.fromkeys(_STEP_FLOPS, _step),
}
"""Products of each op."""


def scan_traffic(op: Op, inputs: Shapes, element: float) -> FloatArray:
    """Return the bytes that the kernels of an op of `SCAN_KERNELS` hand to each other, (n,).

    State-space scan: states and C B^T are made in float32 and, but for those of the gradient that are passed on,
    read in elements of `element` bytes. Delta rule: the triangular matrix is made in float32, states, keys and values
    behind its inverse are not. Selective scan: one kernel, which hands nothing on.

    Args:
        op: The operation.
        inputs: Local shape arrays of its inputs.
        element: Bytes of an element of its data.
    """
    if op.kind in _SELECTIVE_FLOPS:
        return np.zeros(len(shape_of(inputs, 0)))
    s = _sizes_of(op, inputs)
    states = s.chunks * s.rows * s.columns
    if op.kind in (_STATE_SPACE, _STATE_SPACE_GRAD):
        scores = s.shared * s.chunk * s.chunk / 2
        if op.kind == _STATE_SPACE:
            return (2 * FLOAT32 + 2 * element) * states + 2 * FLOAT32 * scores
        return (6 * FLOAT32 + 5 * element) * states + 5 * FLOAT32 * scores
    matrices, vectors = s.chunks * s.chunk * s.chunk, s.chunks * s.chunk * (s.rows + 2 * s.columns)
    if op.kind == _DELTA:
        return 2 * element * (states + matrices + vectors) + 2 * FLOAT32 * matrices
    return 4 * element * (states + vectors) + element * matrices


def scan_kept_bytes(op: Op, inputs: Shapes, element: float) -> FloatArray:
    """Return the bytes an op of `SCAN_KERNELS` keeps for its gradient besides its operands.

    Delta rule: inverses of triangular matrices. Selective scan: two float32 per number of state and chunk.
    """
    if op.kind in _SELECTIVE_FLOPS:
        x = shape_of(inputs, 0).astype(np.float64)
        chunks = np.ceil(x[:, 1] / SELECTIVE_CHUNK)
        states = x[:, 0] * chunks * num_elements(shape_of(inputs, 2))
        return 2.0 * FLOAT32 * states * (op.kind == _SELECTIVE)
    s = _sizes_of(op, inputs)
    return element * s.chunks * s.chunk * s.chunk * (op.kind == _DELTA)

"""Floating-point operations of an op on local shapes.

A multiply and an add count 2. Only matrix products, convolutions and attention are counted; the arithmetic of
element-wise ops, norms and reductions runs on vector units behind the memory traffic and is neglected (their time is
that of their bytes, see `autopar.cost.traffic`). Recomputed forwards are not counted, so that summed over a step
these are the model FLOPs of MFU.

Shape arrays are (n, rank), one row per strategy; results are (n,).
"""

import numpy as np

from autopar.cost.arrays import FloatArray, Shapes
from autopar.cost.attention import ATTENTION_KINDS, attention_work
from autopar.cost.products import op_products
from autopar.ir.graph import Op


def op_flops(op: Op, inputs: Shapes, outputs: Shapes) -> FloatArray:
    """Return the floating-point operations of one device for each strategy.

    Args:
        op: The operation.
        inputs: Local shape arrays (n, rank) of its inputs.
        outputs: Local shape arrays (n, rank) of its outputs.

    >>> op = Op("fc", "MatMul", ("x", "w"), ("y",))
    >>> op_flops(op, [np.array([[8, 4]]), np.array([[4, 6]])], [np.array([[8, 6]])])  # 2 x 8 x 6 x 4
    array([384.])
    """
    if op.kind in ATTENTION_KINDS:
        return attention_work(op, inputs, outputs).flops
    total = np.zeros(next((len(shape) for shape in (*outputs, *inputs) if shape is not None), 0))
    for product in op_products(op, inputs, outputs):
        total = total + product.flops
    return total

"""Shares of tensors that carry data: of rows of experts, which kernels hold compactly (`autopar.ir.bodies.experts`).

A value of fill 1/8 takes an eighth of its bytes, and of its time on the way between devices.
"""

from collections.abc import Iterable, Mapping

from autopar.ir.graph import Op, Value

_WRITERS = frozenset(
    f"autopar::{kind}" for kind in ("ExpertDispatch", "ExpertCombineGrad", "GroupedMatMul", "GroupedMatMulGrad")
)
"""Kinds whose first output has the fill that the op states."""
READERS = frozenset(f"autopar::{kind}" for kind in ("ExpertCombine", "ExpertSum", "GroupedMatMulWeightGrad"))
"""Kinds that read partly filled rows and write whole tensors."""
ROW_DIMS = 3
"""Leading dims of rows: experts, samples, positions."""


def fill_of(op: Op) -> float:
    """Return the share of its rows that an op works on."""
    fill = op.attr("fill", 1.0)
    return float(fill) if isinstance(fill, int | float) else 1.0


def fills(ops: Iterable[Op], values: Mapping[str, Value]) -> dict[str, float]:
    """Return the values of which a share carries data, and the share.

    What an element-wise op or a change of the last dim makes of partly filled rows is as full as they are.

    Args:
        ops: In order.
        values: By name; shapes may be global or local.
    """
    found: dict[str, float] = {}
    for op in ops:
        if op.kind in _WRITERS:
            found[op.outputs[0]] = fill_of(op)
        elif op.kind not in READERS:
            rows = [name for name in op.inputs if name in found]
            if rows:
                leading = values[rows[0]].shape[:ROW_DIMS]
                share = max(found[name] for name in rows)
                same = (name for name in op.outputs if name and values[name].shape[:ROW_DIMS] == leading)
                found.update(dict.fromkeys(same, share))
    return found

"""Gradients of scans over tokens (`autopar.ir.bodies.scans`): kernels that compute the states again."""

from collections.abc import Mapping

from autopar.ir.graph import Op
from autopar.training.rules.base import Grads, Rule, grad_of
from autopar.training.tape import Tape


def _scan(t: Tape, op: Op, grads: Grads) -> Grads:
    """Gradients of all inputs, which have their shapes."""
    shapes = [t.shape(name) for name in op.inputs]
    return t.emit_all(f"{op.kind}Grad", [*op.inputs, grad_of(grads)], shapes, t.dtype(op.inputs[0]), **dict(op.attrs))


SCANS: Mapping[str, Rule] = dict.fromkeys(
    ("autopar::StateSpaceScan", "autopar::SelectiveScan", "autopar::GatedDeltaRule"), _scan
)
"""Rules by kind."""

"""Cross-entropies of a linear head that never hold all logits: kernels make them for some tokens at a time.

With a vocabulary of 128 thousand words a million tokens have 270 GB of logits in 16 bits, more than all else that a
layer keeps. Kernels that fuse the head with its loss (Cut Cross-Entropy, Wijmans et al. 2024, arXiv:2411.09009; Liger
Kernel; `ChunkedLossWrapper` of torchtitan) make the logits of some tokens, reduce them, and make them once more for the
gradient. What is kept is the largest logit of each token and the sum of exponentials, as in a vocabulary-parallel loss,
so that tokens and classes can be split over devices all the same.

    logits = h W;  m = max(logits)              ->  m = HeadRowMax(h, W)
    s, p   = CrossEntropyStats(logits, m, y)    ->  s, p = HeadStats(h, W, m, y)
    dlogits = CrossEntropyGrad(logits, m, s, y) ->  dh, dW = HeadGrad(h, W, m, s, y)
    dh = dlogits W^T;  dW = h^T dlogits
"""

from collections.abc import Iterable
from dataclasses import replace

from autopar.errors import JobError
from autopar.ir.graph import Graph, Op, Phase

CHUNKED = "chunked-cross-entropy"
"""Name of the loss."""
_HINT = "leave --loss out; a head without a bias whose logits only the loss reads can be chunked"


def without_logits(step: Graph) -> Graph:
    """Return a training step whose head and cross-entropy are kernels that hold the logits of some tokens only.

    Raises:
        JobError: If the logits are not those of a product with a matrix, or something else reads them.
    """
    makers, readers = step.producers(), step.consumers()
    stats = next((op for op in step.ops if op.kind == "autopar::CrossEntropyStats"), None)
    if stats is None:
        raise JobError("there is no cross-entropy to chunk", hint="leave --loss out")
    logits, row_max, labels, classes = stats.inputs
    head = makers.get(logits)
    if head is None or head.kind != "MatMul" or len(step.values[head.inputs[1]].shape) != 2:
        made = "an input" if head is None else f"made by {head.kind}"
        raise JobError(f"the logits {logits!r} are {made}, not by a product with a matrix", hint=_HINT)
    hidden, weight = head.inputs
    grad = _only(op for op in readers[logits] if op.kind == "autopar::CrossEntropyGrad")
    largest = makers[row_max]
    if grad is None or {op.name for op in readers[logits]} != {stats.name, largest.name, grad.name}:
        raise JobError(f"ops beside the loss read the logits {logits!r}", hint=_HINT)
    (dlogits,) = grad.outputs
    products = readers[dlogits]
    dhidden = _only(op for op in products if op.inputs == (dlogits, weight))
    dweight = _only(op for op in products if op.inputs == (hidden, dlogits))
    if dhidden is None or dweight is None or len(products) > 2:
        raise JobError(f"the gradient of the logits {logits!r} is no product of both its operands", hint=_HINT)
    outputs = (*dhidden.outputs, *dweight.outputs)
    replaced = {
        largest.name: replace(largest, kind="autopar::HeadRowMax", inputs=(hidden, weight), attrs=()),
        stats.name: replace(stats, kind="autopar::HeadStats", inputs=(hidden, weight, row_max, labels, classes)),
        grad.name: Op(
            grad.name, "autopar::HeadGrad", (hidden, weight, *grad.inputs[1:]), outputs,
            phase=Phase.BACKWARD, block=grad.block, origin=grad.origin,
        ),
    }  # fmt: skip
    gone = {head.name, dhidden.name, dweight.name}
    ops = tuple(replaced.get(op.name, op) for op in step.ops if op.name not in gone)
    read = {name for op in ops for name in op.inputs}
    constants = {name: array for name, array in step.constants.items() if name in read}
    values = {
        name: value
        for name, value in step.values.items()
        if name not in (logits, dlogits) and (name in constants or name not in step.constants)
    }
    return replace(step, ops=ops, values=values, constants=constants)


def _only(ops: Iterable[Op]) -> Op | None:
    """Return the one op among some; None if there is none, or several."""
    found = list(ops)
    return found[0] if len(found) == 1 else None

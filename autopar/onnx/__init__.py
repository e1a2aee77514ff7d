"""ONNX models in: read, simplified and brought into the IR with static shapes."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.ir.graph import Graph
from autopar.plan import DimSize
from autopar.progress import StopCallback, never

if TYPE_CHECKING:
    import onnx

__all__ = ["load"]


def load(
    source: "str | Path | onnx.ModelProto",
    *,
    dims: Mapping[str, DimSize] | None = None,
    batch: int | None = None,
    should_stop: StopCallback = never,
) -> Graph:
    """Return a model as a graph of static shapes at one opset (24, or the model's own if that is newer).

    Weights need not be there: trained tensors become states that have a shape and no data, and external data files
    are not opened for them. Local functions are inlined; shape arithmetic, `Identity`, `Dropout` and casts to the
    same type are folded away; unused ops are dropped. `Graph.metadata` keeps `producer`, `sha256` (of the file),
    `dims` (JSON: bound dims), `batch`, `batch_inputs` (JSON: the data inputs that have the batch as a dim) and, if that
    is not always dim 0, `batch_axes` (JSON: that dim by input); `frozen` (JSON) names parameters that are not trained.

    Args:
        source: An ONNX file, or a model in memory (which is not changed).
        dims: Sizes of dynamic dims by name; an unnamed one is called `INPUT.AXIS`. A dim that is an expression of
            others ("4096-kv") follows from them.
        batch: Size of the batch dim of the data inputs: the dim named as a batch, else dim 0, whatever its name. A
            model exported for a fixed batch is re-batched if its constants permit.
        should_stop: Polled.

    Raises:
        ModelError: If the source is no complete ONNX model, has unbound dims, unknown ops, control flow that depends
            on data, shapes that depend on data, or cannot be re-batched. The message names the node.
        InterruptedSearchError: If `should_stop` said so.
    """
    from autopar.onnx.isolated import warm_up

    warm_up()
    from autopar.onnx.importer import import_model
    from autopar.onnx.reader import read

    return import_model(read(source), dims or {}, batch, should_stop)

"""PyTorch modules as ONNX models without their weights.

The module is copied with stand-ins for its parameters: tensors of the right shape whose elements all lie in one place
in memory. PyTorch's exporter traces the copy without computing anything, and the file names each weight and where its
data would be, but holds none. So the model may be of any size, on any device, also `meta`.
"""

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import ModelError
from autopar.ir.functions import DOMAIN, function_proto
from autopar.onnx import load
from autopar.onnx.roles import FROZEN_KEY
from autopar.torch_experts import experts_as_ops
from autopar.writing import write_atomically

if TYPE_CHECKING:
    import onnx

OPSET = 23
"""The first with Attention, RMSNormalization and RotaryEmbedding as ops, which the planner knows as one kernel each."""
TRANSPOSED = ".T"
"""End of the name of a weight that is [in, out] in the graph where the module has [out, in]."""
_NEEDED = ("torch", "onnxscript")
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"


def check_installed(packages: Sequence[str] = _NEEDED) -> None:
    """Refuse to go on without PyTorch and what its exporter needs.

    Raises:
        ModelError: If a package is missing.
    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ModelError(
            f"reading PyTorch models needs {', '.join(missing)}, which is not installed",
            hint='pip install "autopar[torch]"',
        )


def from_torch(
    module: Any,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    path: str | Path,
) -> Path:
    """Write a PyTorch module to an ONNX file without weights, and return the file's path.

    The module is left as it is; its parameters may be on any device, also `meta`. Parameters with `requires_grad=False`
    are not trained: they get no gradient and no optimizer state. Dim 0 of the inputs is the batch, which the planner
    changes; give 2 samples, so that it can be told from dims of size 1. If the module computes with that number so that
    it cannot be changed, a warning says so.

    Args:
        module: A `torch.nn.Module`; its first result is what the loss is computed from.
        example_inputs: Positional arguments, or keyword arguments by name.
        path: The `.onnx` file to write. `autopar.solve` takes it as the model.

    Raises:
        ModelError: If PyTorch is not installed, or cannot export the module.
        PlanError: If the file cannot be written.
    """
    model = to_onnx(module, example_inputs)
    _check_batch(model)
    path = Path(path)
    write_atomically(path, model.SerializeToString(deterministic=True))
    return path


def to_onnx(module: Any, example_inputs: Sequence[Any] | Mapping[str, Any]) -> "onnx.ModelProto":
    """Return a PyTorch module as an ONNX model without weights; arguments and errors as of `from_torch`."""
    check_installed()
    named = isinstance(example_inputs, Mapping)
    args = () if named else tuple(example_inputs)
    kwargs = dict(example_inputs) if isinstance(example_inputs, Mapping) else {}
    stand_in = _without_weights(module).eval()
    with experts_as_ops(stand_in):
        program = _exported(stand_in, args, kwargs)
    model = program.model
    weights = _take_weights(model)
    frozen = {name for name, weight in module.named_parameters(remove_duplicate=False) if not weight.requires_grad}
    for weight in weights:
        if weight.name in frozen:
            weight.metadata_props[FROZEN_KEY] = "1"
    with _quiet(), _splits_tried_on_slices():
        program.optimize()
    _turn_weights(model, set(weights))
    _give_weights(model, weights)
    import onnx_ir

    proto: onnx.ModelProto = onnx_ir.to_proto(model)
    proto.graph.name = type(module).__name__
    proto.functions.extend(
        function_proto(f"{DOMAIN}::{kind}")
        for kind in sorted({node.op_type for node in proto.graph.node if node.domain == DOMAIN})
    )
    return proto


def _check_batch(proto: "onnx.ModelProto") -> None:
    """Warn if a model takes only the number of samples it was traced with."""
    traced = int(load(proto).metadata.get("batch", "1"))
    try:
        load(proto, batch=traced + 1)
    except ModelError as error:
        reason = str(error.args[0])
        warnings.warn(
            f"{proto.graph.name} is planned with microbatches of {traced}, the number of samples it was traced with: "
            f"{reason}",
            stacklevel=3,
        )


def _without_weights(module: Any) -> Any:
    """Return a copy whose parameters take no memory; buffers without data get numbers between 0 and 1."""
    import torch

    stand_ins: dict[int, Any] = {}
    for parameter in module.parameters():
        one = torch.zeros((1,) * parameter.ndim, dtype=parameter.dtype)
        stand_ins[id(parameter)] = torch.nn.Parameter(one.expand(parameter.shape), requires_grad=False)
    for buffer in module.buffers():
        if buffer.is_meta:
            line = torch.linspace(0, 1, max(1, buffer.numel())).reshape(buffer.shape)
            stand_ins[id(buffer)] = line.to(buffer.dtype)
    return copy.deepcopy(module, stand_ins)


def _exported(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    import torch

    with _quiet():
        try:
            program = torch.onnx.export(
                module, args, kwargs=kwargs, dynamo=True, opset_version=OPSET, verbose=False, optimize=False
            )
        except torch.onnx.errors.OnnxExporterError as error:
            reason = str(error.__cause__ or error).strip().splitlines()[0]
            raise ModelError(
                f"PyTorch cannot export {type(module).__name__} to ONNX: {reason}",
                hint="torch.onnx.export(..., dynamo=True, report=True) says more",
            ) from error
    assert program is not None, "the exporter returns a program unless it is given a file"
    return program


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's remarks about optional packages and future versions to itself."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _splits_tried_on_slices() -> Iterator[None]:
    """Have onnxscript try its rule for two slices on slices only.

    Whatever op it is given, it first looks at all ops of the graph, though it rewrites nothing that is no Slice: half
    of the time that a model of 80 layers took.
    """
    from onnxscript.rewriter.rules.common import slice_split_rule

    tried = slice_split_rule.try_rewrite

    def on_slices(model: Any, graph: Any, node: Any, **how: Any) -> Any:
        return tried(model, graph, node, **how) if node.op_type == "Slice" else None

    slice_split_rule.try_rewrite = on_slices
    try:
        yield
    finally:
        del slice_split_rule.try_rewrite


def _take_weights(model: Any) -> list[Any]:
    """Make inputs of the parameters and return them: what an optimizer does not know, it neither folds nor merges."""
    weights = [value for value in model.graph.initializers.values() if value.metadata_props.get(_KIND) == "PARAMETER"]
    for value in weights:
        del model.graph.initializers[value.name]
        value.const_value = None
        model.graph.inputs.append(value)
    return weights


def _turn_weights(model: Any, weights: Set[Any]) -> None:
    """Turn round weights that are only ever read so: the transpose of a weight that is kept like that is no work."""
    for node in list(model.graph):
        if node.op_type != "Transpose" or node.inputs[0] not in weights:
            continue
        weight = node.inputs[0]
        order = node.attributes.get("perm")
        turned = [1, 0] if len(weight.shape) == 2 else [0, 2, 1]  # a matrix, or one per expert
        if len(weight.shape) != len(turned) or len(weight.uses()) > 1:
            continue
        if list(order.value) != turned if order else len(turned) > 2:
            continue
        node.outputs[0].replace_all_uses_with(weight)
        model.graph.remove(node)
        shape = list(weight.shape)
        weight.shape = type(weight.shape)(shape[index] for index in turned)
        weight.name += TRANSPOSED


def _give_weights(model: Any, weights: list[Any]) -> None:
    """Make initializers of the parameters again, with data in a file that is not there; drop the traces of nodes."""
    import onnx_ir

    for weight in weights:
        model.graph.inputs.remove(weight)
        if not weight.uses():
            continue
        weight.const_value = onnx_ir.ExternalTensor(
            "weights.bin",
            0,
            weight.dtype.itemsize * prod(weight.shape),
            weight.dtype,
            shape=weight.shape,
            name=weight.name,
        )
        weight.metadata_props[_KIND] = "PARAMETER"
        model.graph.initializers[weight.name] = weight
    for node in model.graph:
        node.metadata_props.clear()
        for output in node.outputs:
            output.metadata_props.clear()
    model.metadata_props.clear()

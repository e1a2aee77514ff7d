"""An executor of ONNX ops on numpy arrays, built on `onnx.reference`.

Shapes are dynamic: one cached evaluator serves an op of a given kind, attributes and input pattern on any shape, so an
op can be run on thousands of shards at 10 to 50 microseconds each. Floats keep the precision they come in: fed with
float64, a float32 graph computes in float64 (except behind an explicit `Cast`).
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import ExecutionError, ModelError, UnsupportedOpError
from autopar.ir.graph import Attr, Graph, Op

Array = NDArray[Any]

_KERNEL_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError
)  # fmt: skip
"""What numpy and the reference kernels, some of which check inputs with `assert`, raise on what they cannot take."""


def split_kind(kind: str) -> tuple[str, str]:
    """Return domain and op type of a kind.

    >>> split_kind("MatMul"), split_kind("autopar::Adam")
    (('', 'MatMul'), ('autopar', 'Adam'))
    """
    domain, _, op_type = kind.rpartition("::")
    return domain, op_type


class Executor:
    """Runs single ops. It caches an evaluator per distinct op, so keep one and use it often.

    >>> op = Op("sum", "Add", ("a", "b"), ("c",))
    >>> Executor().run(op, [np.ones(2), np.ones(2)], opset=24)[0].tolist()
    [2.0, 2.0]
    """

    def __init__(self) -> None:
        self._evaluators: dict[tuple[object, ...], Any] = {}
        self._functions: dict[str, tuple[Any, dict[str, Attr]]] = {}
        self._overrides: list[type] = []

    def run(self, op: Op, inputs: Sequence[Array | None], opset: int) -> tuple[Array, ...]:
        """Run one op.

        Args:
            op: The op; only its kind, attributes and the number of outputs count.
            inputs: One array per input of the op, None where an optional input is absent.
            opset: Version of the default ONNX domain.

        Returns:
            One array per output of the op, also for outputs named "".

        Raises:
            UnsupportedOpError: If nothing implements the op's kind.
            ExecutionError: If the kernel does not take these inputs.
        """
        return self.run_kind(op.kind, op.attrs, inputs, len(op.outputs), opset, name=op.name)

    def run_kind(
        self,
        kind: str,
        attrs: tuple[tuple[str, Attr], ...],
        inputs: Sequence[Array | None],
        num_outputs: int,
        opset: int,
        name: str = "",
    ) -> tuple[Array, ...]:
        """Run an op given by its parts; see `run`."""
        dtypes = tuple(None if array is None else array.dtype for array in inputs)
        key = (kind, attrs, dtypes, num_outputs, opset)
        evaluator = self._evaluators.get(key)
        if evaluator is None:
            evaluator = self._evaluators[key] = self._build(kind, attrs, dtypes, num_outputs, opset, name)
        feeds = {f"i{index}": array for index, array in enumerate(inputs) if array is not None}
        try:
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outputs = evaluator.run(None, feeds)
        except _KERNEL_ERRORS as error:
            shapes = ", ".join("-" if array is None else f"{array.dtype}{list(array.shape)}" for array in inputs)
            raise ExecutionError(f"op {name!r} ({kind}) failed on inputs {shapes}: {error}") from error
        return tuple(map(np.asarray, outputs[:num_outputs]))

    def _build(
        self,
        kind: str,
        attrs: tuple[tuple[str, Attr], ...],
        dtypes: tuple[np.dtype[Any] | None, ...],
        num_outputs: int,
        opset: int,
        name: str,
    ) -> Any:
        """Return a reference evaluator of a graph that holds just this op."""
        from onnx import helper

        from autopar.execute.evaluator import Evaluator

        domain, op_type = split_kind(kind)
        names = ["" if dtype is None else f"i{index}" for index, dtype in enumerate(dtypes)]
        outputs = [f"o{index}" for index in range(num_outputs)]
        given = dict(attrs)
        functions = []
        try:
            if domain == "autopar":
                function, defaults = self._function(op_type)
                functions.append(function)
                names += [""] * (len(function.input_names) - len(names))
                outputs += [f"o{index}" for index in range(num_outputs, len(function.output_names))]
                given = defaults | given
            node = helper.make_node(op_type, names, outputs, domain=domain, **given)
            graph = helper.make_graph(
                [node],
                op_type,
                [
                    helper.make_tensor_value_info(f"i{index}", helper.np_dtype_to_tensor_dtype(dtype), None)
                    for index, dtype in enumerate(dtypes)
                    if dtype is not None
                ],
                [helper.make_empty_tensor_value_info(output) for output in outputs],
            )
            opsets = {"": opset, "autopar": 1} | ({domain: 1} if domain else {})
            return Evaluator(graph, opsets=opsets, functions=functions, new_ops=self._new_ops())
        except (KeyError, RuntimeError) as error:
            raise UnsupportedOpError(
                f"op {name!r} of kind {kind!r} has no implementation at opset {opset}",
                hint="rewrite it with standard ONNX ops, or add a function body to autopar.ir.functions",
            ) from error

    def _function(self, op_type: str) -> tuple[Any, dict[str, Attr]]:
        """Return the evaluator of a function of domain `autopar` and the default values of its attributes."""
        if op_type not in self._functions:
            from onnx import helper

            from autopar.execute.evaluator import Evaluator
            from autopar.ir.functions import function_proto

            proto = function_proto(f"autopar::{op_type}")
            body = type(proto)()
            body.CopyFrom(proto)
            # The reference evaluator knows attributes of functions only by name: defaults are filled in by the caller.
            body.attribute.extend(attribute.name for attribute in proto.attribute_proto)
            del body.attribute_proto[:]
            callees = {node.op_type for node in proto.node if node.domain == "autopar"}
            functions = [self._function(callee)[0] for callee in sorted(callees)]
            evaluator = Evaluator(body, functions=functions, new_ops=self._new_ops())
            defaults = {attribute.name: helper.get_attribute_value(attribute) for attribute in proto.attribute_proto}
            self._functions[op_type] = (evaluator, defaults)
        return self._functions[op_type]

    def _new_ops(self) -> list[type]:
        """Return our kernels as op classes of the reference evaluator."""
        if not self._overrides:
            from onnx.reference.op_run import OpRun

            from autopar.execute.kernels import KERNELS

            def override(op_type: str, kernel: Any) -> type:
                def run(self: Any, *args: Any, **attrs: Any) -> Any:
                    return kernel(*args, **(attrs | {"num_outputs": len(self.output)}))  # Split has it as an attribute

                return type(op_type, (OpRun,), {"op_domain": "", "_run": run})

            self._overrides = [override(op_type, kernel) for op_type, kernel in KERNELS.items()]
            self._overrides.append(_attention())
        return self._overrides


def _attention() -> type:
    """Return attention of the reference evaluator, made to follow the specification in two places.

    It takes the root of a scale in float32, whatever the numbers are, and makes a causal mask of no more rows than the
    mask has that is given, where one row stands for all queries.
    """
    from onnx.reference.ops.op_attention import Attention

    def run(self: Any, q: Array, k: Array, v: Array, attn_mask: Array | None = None, *others: Any, **attrs: Any) -> Any:
        if attrs.get("scale") is not None:
            attrs["scale"] = float(attrs["scale"])
        if attn_mask is not None and attrs.get("is_causal") and attn_mask.ndim > 1 and attn_mask.shape[-2] == 1:
            attn_mask = np.repeat(attn_mask, q.shape[-2], axis=-2)
        return Attention._run(self, q, k, v, attn_mask, *others, **attrs)

    return type("Attention", (Attention,), {"op_domain": "", "_run": run, "_validate_attention25": False})


def run_graph(graph: Graph, feeds: Mapping[str, Array], executor: Executor | None = None) -> dict[str, Array]:
    """Run all ops of a graph in order.

    Args:
        graph: The graph.
        feeds: An array for each input and each state of the graph, by value name. It may also override constants.
        executor: Reused if given, so that its evaluators are shared between runs.

    Returns:
        Every value of the graph by name, fed ones included.

    Raises:
        ModelError: If a feed is missing or has another shape than the graph says.
        UnsupportedOpError: If nothing implements an op's kind.
        ExecutionError: If a kernel fails.
    """
    runner = executor or Executor()
    values: dict[str, Array] = dict(graph.constants) | dict(feeds)
    for name in (*graph.inputs, *(state.input for state in graph.states)):
        if name not in values:
            raise ModelError(f"no data for value {name!r}", hint="feed every input and every state of the graph")
        if values[name].shape != graph.values[name].shape:
            raise ModelError(f"value {graph.values[name]} is fed with data of shape {list(values[name].shape)}")
    for op in graph.ops:
        outputs = runner.run(op, [values[name] if name else None for name in op.inputs], graph.opset)
        values.update((name, array) for name, array in zip(op.outputs, outputs, strict=True) if name)
    return values

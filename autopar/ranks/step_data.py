"""Seeded numbers to run a step on: weights, and data of every microbatch.

The same seed gives the same numbers in every process, whatever part of them it needs.
"""

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar import models
from autopar.errors import ModelError
from autopar.ir.graph import Graph, Op, Role, Value
from autopar.onnx.reader import read
from autopar.onnx.tensors import ELEM_TYPES, constant_tensor, has_data, read_array
from autopar.training import STEP
from autopar.workload import ZOO, Workload

Array = NDArray[Any]

_VIEWS = ("Cast", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze")
"""Ops that hand on whole numbers as they are."""
_CLASSES = {"autopar::CrossEntropyStats": (2, 3), "autopar::HeadStats": (3, 4)}
"""Ops that read labels: the inputs that hold the labels, and the numbers of all classes."""
_ONES = {
    "LayerNormalization": (1,), "RMSNormalization": (1,), "GroupNormalization": (1,), "InstanceNormalization": (1,),
    "BatchNormalization": (1, 4), "autopar::BatchNorm": (3,),
}  # fmt: skip
"""Inputs that scale: weights that start at 1."""
_ZEROS = {
    "Add": (0, 1), "LayerNormalization": (2,), "GroupNormalization": (2,), "InstanceNormalization": (2,),
    "BatchNormalization": (2, 3), "Conv": (2,), "ConvTranspose": (2,), "Gemm": (2,),
}  # fmt: skip
"""Inputs that shift: vectors that start at 0."""


def numpy_type(dtype: str) -> np.dtype[Any]:
    """Return numpy's type for an element type of the IR."""
    from onnx import helper

    found: np.dtype[Any] = np.dtype(helper.tensor_dtype_to_np_dtype(ELEM_TYPES[dtype]))
    return found


class Weights:
    """The persistent tensors a run starts from.

    What the model's file holds is taken from there; models of the zoo start as they are trained; the rest is drawn:
    matrices with variance 1 over their number of rows, scales 1, shifts 0. Moments are 0.

    Args:
        workload: The model; None if all is drawn.
        graph: Its graph.
        seed: Any number.
    """

    def __init__(self, workload: Workload | None, graph: Graph, seed: int) -> None:
        self._graph = graph
        self._seed = seed
        self._roles = {state.input: state.role for state in graph.states}
        self._uses = graph.consumers()
        self.num_given = 0
        self._given: Mapping[str, Callable[[], Array]]
        if workload is None:
            self._given = {}
        elif workload.source.startswith(ZOO):
            assert not isinstance(workload.model, str), "a model of the zoo is in memory"
            values = models.initial_values(workload.model, seed)
            self._given = {name: lambda array=array: array for name, array in values.items()}  # type: ignore[misc]
        else:
            self._given = _stored(workload)
        self.num_given = sum(name in self._given for name, role in self._roles.items() if _is_content(role))

    @property
    def num_drawn(self) -> int:
        """How many parameters and buffers the model gives no numbers for."""
        return sum(map(_is_content, self._roles.values())) - self.num_given

    def __call__(self, name: str) -> Array:
        """Return a whole tensor.

        Raises:
            ModelError: If what the file holds does not have the shape the graph says.
        """
        value = self._graph.values[name]
        if not _is_content(self._roles[name]):
            return np.zeros(value.shape, numpy_type(value.dtype))
        array = self._given[name]() if name in self._given else self._drawn(value)
        if array.shape != value.shape and array.shape[1:] == value.shape[1:] and array.ndim and value.shape:
            array = array[: value.shape[0]]  # one row per sample, for another number of samples
        if array.shape != value.shape:
            raise ModelError(f"tensor {name!r} has shape {list(array.shape)}, the graph has {value}")
        return np.asarray(array).astype(numpy_type(value.dtype))

    def _drawn(self, value: Value) -> Array:
        users = self._uses.get(value.name, [])
        if _feeds(value.name, users, _ONES):
            return np.ones(value.shape)
        if len(value.shape) < 2 and _feeds(value.name, users, _ZEROS):
            return np.zeros(value.shape)
        if not value.is_float:
            return np.ones(value.shape)
        rows = max(1, int(np.prod(value.shape[1:])) if any(op.kind.startswith("Conv") for op in users) else 0)
        rows = max(rows, value.shape[-2] if len(value.shape) > 1 else 1)
        rng = np.random.default_rng([self._seed, zlib.crc32(value.name.encode())])
        return rng.normal(0.0, rows**-0.5, value.shape)


def _is_content(role: Role) -> bool:
    return role in (Role.PARAMETER, Role.BUFFER)


def _feeds(name: str, users: list[Op], slots: Mapping[str, tuple[int, ...]]) -> bool:
    return any(name == op.inputs[slot] for op in users for slot in slots.get(op.kind, ()) if slot < len(op.inputs))


def _stored(workload: Workload) -> Mapping[str, Callable[[], Array]]:
    """Return what reads each tensor the model's file has numbers for."""
    source = read(workload.model)
    found: dict[str, Callable[[], Array]] = {}
    for tensor in source.model.graph.initializer:
        if has_data(tensor, source.folder):
            found[tensor.name] = lambda tensor=tensor: read_array(tensor, source.folder)  # type: ignore[misc]
    for node in source.model.graph.node:
        if node.op_type == "Constant":
            tensor = constant_tensor(node, f"node {node.name!r}")
            if has_data(tensor, source.folder):
                found[node.output[0]] = lambda tensor=tensor: read_array(tensor, source.folder)  # type: ignore[misc]
    return found


class Batches:
    """Data of every step and microbatch.

    Whole numbers that choose rows or classes are drawn from those there are; other whole numbers and booleans are 1
    (masks that keep everything); floats are normal.

    Args:
        graph: The graph of one microbatch.
        seed: Any number.
    """

    def __init__(self, graph: Graph, seed: int) -> None:
        self._graph = graph
        self._seed = seed
        self._limits = {name: _limit(graph, name) for name in graph.inputs if not graph.values[name].is_float}

    def limit(self, name: str) -> int | None:
        """Return how many rows or classes the numbers of an input choose from; None if they choose nothing."""
        return self._limits.get(name)

    def __call__(self, step: int, microbatch: int) -> dict[str, Array]:
        """Return an array for each input of the graph; steps and microbatches count from 0."""
        data: dict[str, Array] = {}
        for index, name in enumerate(self._graph.inputs):
            value, rng = self._graph.values[name], np.random.default_rng([self._seed, step, microbatch, index])
            dtype = numpy_type(value.dtype)
            if name == STEP:
                data[name] = np.asarray(step + 1, dtype)
            elif value.is_float:
                data[name] = rng.normal(size=value.shape).astype(dtype)
            else:
                limit = self._limits[name]
                drawn = np.ones(value.shape) if limit is None else rng.integers(0, limit, value.shape)
                data[name] = drawn.astype(dtype)
        return data


def _limit(graph: Graph, name: str) -> int | None:
    """Return how many rows or classes the numbers of an input choose from; None if they choose nothing."""
    users = graph.consumers()
    limits: list[int] = []
    pending, seen = [name], {name}
    while pending:
        current = pending.pop()
        for op in users.get(current, []):
            if op.kind == "Gather" and op.inputs[1] == current:
                axis = op.attr("axis", 0)
                assert isinstance(axis, int), "axis of Gather is an integer"
                limits.append(graph.values[op.inputs[0]].shape[axis])
            elif op.kind in _CLASSES and op.inputs[_CLASSES[op.kind][0]] == current:
                limits.append(graph.values[op.inputs[_CLASSES[op.kind][1]]].size)
            elif op.kind in _VIEWS and op.inputs[0] == current:
                fresh = [output for output in op.outputs if output and output not in seen]
                seen.update(fresh)
                pending.extend(fresh)
    return min(limits, default=None)

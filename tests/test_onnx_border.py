"""Whatever an ONNX file holds, its import ends with a graph or with one error that says what is wrong."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from autopar import api
from autopar.errors import InterruptedSearchError, ModelError
from autopar.onnx import load
from autopar.onnx.functions import MAX_NODES
from autopar.onnx.isolated import Isolated, RefusedError, isolated
from autopar.request import JobRequest
from autopar.search.settings import SearchSettings
from autopar.task import prepare

node = helper.make_node


def model(
    nodes: Sequence[onnx.NodeProto],
    *,
    shape: Sequence[int] = (2, 6),
    weights: Sequence[onnx.TensorProto] = (),
    opset: int = 20,
    functions: Sequence[onnx.FunctionProto] = (),
) -> onnx.ModelProto:
    """Return a model from `x` to `y`."""
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_empty_tensor_value_info("y")],
        weights,
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("local", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=functions)


def tensor(name: str, values: Any, dtype: Any = np.float32) -> onnx.TensorProto:
    """Return an initializer."""
    return numpy_helper.from_array(np.array(values, dtype), name)


def function(name: str, *calls: str) -> onnx.FunctionProto:
    """Return a local function that calls others, one after the other."""
    names = ["a", *(f"b{index}" for index in range(len(calls) - 1)), "b"]
    nodes = [
        node(kind, [names[index]], [names[index + 1]], domain="" if kind == "Relu" else "local")
        for index, kind in enumerate(calls)
    ]
    return helper.make_function("local", name, ["a"], ["b"], nodes, [helper.make_opsetid("", 20)])


def changed(result: onnx.ModelProto, change: Callable[[onnx.ModelProto], object]) -> onnx.ModelProto:
    """Return a model after a change."""
    change(result)
    return result


def raw(result: onnx.ModelProto, old: bytes, new: bytes) -> onnx.ModelProto:
    """Return a model with bytes of its file replaced."""
    data = result.SerializeToString()
    assert old in data
    return onnx.ModelProto.FromString(data.replace(old, new))


RELU = model([node("Relu", ["x"], ["y"])])
IMAGE = (1, 3, 8, 8)
KERNEL = tensor("w", np.ones((4, 3, 3, 3)))

MALFORMED: dict[str, tuple[onnx.ModelProto, str]] = {
    "a name of other bytes": (raw(model([node("Relu", ["x"], ["y"], name="abc")]), b"abc", b"a\xffc"), r"b'a\\xffc'"),
    "an op type of other bytes": (raw(RELU, b"Relu", b"Re\xffu"), r"b'Re\\xffu'"),
    "an attribute of other bytes": (
        raw(model([node("Conv", ["x", "w"], ["y"], auto_pad="ABCD")], shape=IMAGE, weights=[KERNEL]), b"ABCD", b"AB\xff"
            b"D"),
        r"b'AB\\xffD'",
    ),
    "no output": (model([node("Relu", ["x"], ["y"]), node("Constant", [], [], value_int=1)]), "has 0 outputs"),
    "an output without a name": (model([node("Relu", ["x"], [""])]), "no output with a name"),
    "a fused op without outputs": (
        model([node("Relu", ["x"], ["y"]), node("FusedMatMul", ["x", "x"], [], domain="com.microsoft")]),
        "no output with a name",
    ),
    "tokens of one dim": (
        model(
            [node("EmbedLayerNormalization", ["t", "", "w", "w", "", "w", "w"], ["y"], domain="com.microsoft")],
            weights=[tensor("t", [1], np.int32), tensor("w", [1])],
        ),
        "its tokens have 1 dims, not 2",
    ),
    "no input": (model([node("Dropout", [], ["y"])]), "has 0 inputs, not at least 1"),
    "Shape of nothing": (model([node("Shape", [], ["y"])]), "has 0 inputs, not 1"),
    "If without a condition": (model([node("If", [], ["y"])]), "'y'.*has 0 inputs"),
    "an absent required input": (model([node("MatMul", ["x", ""], ["y"])]), "lacks input 1"),
    "an absent required attribute": (model([node("Cast", ["x"], ["y"])]), "lacks attribute 'to'"),
    "an attribute of another type": (model([node("Softmax", ["x"], ["y"], axis=[1])]), "'axis' of type INTS, not INT"),
    "an empty kernel": (
        changed(
            model([node("MaxPool", ["x"], ["y"], kernel_shape=[2, 2])], shape=IMAGE),
            lambda made: made.graph.node[0].attribute[0].ClearField("ints"),
        ),
        "'kernel_shape' that is an empty list",
    ),
    "a flag that is a number": (
        model([node("ReduceSum", ["x"], ["y"], keepdims=10**18)]),
        "'keepdims' that is 10+, not 0 or 1",
    ),
    "no groups": (
        model([node("Conv", ["x", "w"], ["y"], group=0)], shape=IMAGE, weights=[KERNEL]),
        "does not fit.*0 groups",
    ),
    "a kernel of fewer dims": (
        model([node("Conv", ["x", "w"], ["y"], kernel_shape=[3, 3])], shape=IMAGE, weights=[tensor("w", [[[1.0]]])]),
        "its images have 4 dims, its weights 3",
    ),
    "a kernel of another shape": (
        model([node("Conv", ["x", "w"], ["y"], kernel_shape=[5, 5])], shape=IMAGE, weights=[KERNEL]),
        r"kernel_shape is \[5, 5\], its weights are for",
    ),
    "a bias of another length": (
        model([node("Conv", ["x", "w", "b"], ["y"])], shape=IMAGE, weights=[KERNEL, tensor("b", np.ones(5))]),
        "its bias is not one number for each of 4 channels",
    ),
    "a scale that fits no dim": (
        model([node("LayerNormalization", ["x", "s"], ["y"])], weights=[tensor("s", np.ones(5))]),
        r"input 1 cannot be broadcast to \[2, 6\]",
    ),
    "updates of another number than indices": (
        model(
            [node("ScatterElements", ["x", "i", "u"], ["y"])],
            weights=[tensor("i", [[0, 1, 0]], np.int64), tensor("u", [[1.0, 2.0]])],
        ),
        "there is not one update per index",
    ),
    "more elements than can be counted": (model([node("Relu", ["x"], ["y"])], shape=(2**31, 2**31)), "4.61e\\+18"),
    "a result of more elements": (
        model([node("MatMul", ["x", "z"], ["y"])], shape=(2**40, 1), weights=[
            TensorProto(name="z", dims=[1, 2**40], data_type=1)]),
        "output of node 'y'.*1.21e\\+24",
    ),
    "an Einsum of more elements": (
        model([node("Einsum", ["x", "x"], ["y"], equation="ab,cd->abcd")], shape=(2**20, 2**20)),
        "output of node 'y'.*1.21e\\+24",
    ),
    "a dim below zero": (
        model([node("Add", ["x", "z"], ["y"])], weights=[TensorProto(name="z", dims=[-6], data_type=1)]),
        "initializer 'z'.*negative dim",
    ),
    "too many dims": (model([node("Relu", ["x"], ["y"])], shape=(1,) * 70), "70 dims"),
    "a shape below zero": (
        model([node("ConstantOfShape", ["s"], ["y"])], weights=[tensor("s", [-2], np.int64)]),
        "negative dim",
    ),
    "a fill of two elements": (
        model([node("ConstantOfShape", ["s"], ["y"], value=tensor("v", [1, 2]))], weights=[tensor("s", [2], np.int64)]),
        "2 elements, not one",
    ),
    "a fill of no type": (
        model([node("ConstantOfShape", ["s"], ["y"], value=TensorProto(dims=[1]))],
              weights=[tensor("s", [2], np.int64)]),
        "element type UNDEFINED",
    ),
    "an opset that is none": (
        changed(model([node("Relu", ["x"], ["y"])]), lambda made: made.opset_import.add(domain="d", version=2**40)),
        "version 1099511627776 of domain 'd'",
    ),
    "no opset": (
        changed(model([node("Relu", ["x"], ["y"])]), lambda made: setattr(made.opset_import[0], "version", 0)),
        "version 0 of domain ''",
    ),
    "a function that calls itself": (
        model([node("f", ["x"], ["y"], domain="local")], functions=[function("f", "f")]),
        "'f' calls itself",
    ),
    "functions that call each other": (
        model([node("f", ["x"], ["y"], domain="local")], functions=[function("f", "g"), function("g", "f")]),
        "'f' -> 'g' -> 'f'",
    ),
    "functions that double at each level": (
        model(
            [node("f60", ["x"], ["y"], domain="local")],
            functions=[function("f0", "Relu"), *(function(f"f{n}", f"f{n - 1}", f"f{n - 1}") for n in range(1, 61))],
        ),
        r"stand for 1.153e\+18 nodes",
    ),
    "an old op that onnx cannot convert": (
        model([node("Upsample", ["x"], ["y"])], shape=IMAGE, opset=6),
        "cannot be brought from its opset to 13",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_models_are_one_error(name: str, tmp_path: Path) -> None:
    """A file that breaks a rule of ONNX is refused by one `ModelError`, which names the place."""
    made, message = MALFORMED[name]
    path = tmp_path / "model.onnx"
    path.write_bytes(made.SerializeToString())

    with pytest.raises(ModelError, match=message):
        load(path)


def test_files_that_cannot_be_a_model_are_not_read(tmp_path: Path) -> None:
    """A device has no end, and a checkpoint may be larger than memory: the first bytes and the size are enough."""
    for name, head in (("checkpoint", b"PK\x03\x04"), ("model", b"\x08\x0a")):
        with (tmp_path / name).open("wb") as file:
            file.write(head)
            file.truncate(10**12)

    for path, message in (
        (Path("/dev/zero"), "is a device"),
        (tmp_path / "checkpoint", "is a zip archive"),
        (tmp_path / "model", "has 1000000000000 bytes"),
    ):
        with pytest.raises(ModelError, match=message):
            load(path)


def test_as_many_calls_as_can_be_read_are_inlined() -> None:
    """The bound is on the nodes that calls stand for: 2**7 of them are read, 2**18 are not."""
    levels = [function("f0", "Relu"), *(function(f"f{n}", f"f{n - 1}", f"f{n - 1}") for n in range(1, 19))]

    graph = load(model([node("f7", ["x"], ["y"], domain="local")], functions=levels))
    with pytest.raises(ModelError, match=f"up to {MAX_NODES} are read"):
        load(model([node("f18", ["x"], ["y"], domain="local")], functions=levels))

    assert len(graph.ops) == 128


def external(location: str, length: int = 8) -> onnx.TensorProto:
    """Return a tensor of one int64 that lies in another file."""
    made = TensorProto(name="s", dims=[1], data_type=TensorProto.INT64, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", "8"), ("length", str(length))):
        made.external_data.add(key=key, value=value)
    return made


def data_file(path: Path) -> Path:
    """Write two numbers."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(np.array([5, 12], np.int64).tobytes())
    return path


def saved(folder: Path, item: onnx.TensorProto, *, constant: bool) -> Path:
    """Write a model that reshapes to what a tensor says."""
    nodes = [node("Reshape", ["x", "s"], ["y"])]
    made = model([node("Constant", [], ["s"], value=item), *nodes] if constant else nodes)
    if not constant:
        made.graph.initializer.append(item)
    path = folder / "model.onnx"
    path.write_bytes(made.SerializeToString())
    return path


@pytest.mark.parametrize("constant", [False, True], ids=["initializer", "constant"])
def test_small_external_data_is_read_beside_the_model(tmp_path: Path, *, constant: bool) -> None:
    """Numbers that decide shapes are read from the folder of the model, not from the current one."""
    data_file(tmp_path / "numbers")

    graph = load(saved(tmp_path, external("numbers"), constant=constant))

    assert graph.values["y"].shape == (12,)


@pytest.mark.parametrize("constant", [False, True], ids=["initializer", "constant"])
@pytest.mark.parametrize("where", ["absolute", "outside", "symbolic link", "hard link", "behind a linked folder"])
def test_external_data_elsewhere_is_refused(tmp_path: Path, where: str, *, constant: bool) -> None:
    """A model reads plain files of its own folder only; the message has the path."""
    folder = tmp_path / "model"
    folder.mkdir()
    other = data_file(tmp_path / "other" / "numbers")
    match where:
        case "absolute":
            location = str(other)
        case "outside":
            location = "../other/numbers"
        case "symbolic link":
            location = "link"
            (folder / location).symlink_to(other)
        case "hard link":
            location = "link"
            os.link(other, folder / location)
        case _:
            location = "link/numbers"
            (folder / "link").symlink_to(other.parent)

    with pytest.raises(ModelError, match="is not read") as caught:
        load(saved(folder, external(location), constant=constant))

    assert location in str(caught.value)


@pytest.mark.parametrize("location", ["x" * 5000, "a\0b", "", "absent"], ids=["long", "zero byte", "empty", "absent"])
def test_external_data_that_is_nowhere_is_absent(tmp_path: Path, location: str) -> None:
    """A name no file can have is like a file that is not there: the shape it should say is unknown."""
    with pytest.raises(ModelError, match="depends on data"):
        load(saved(tmp_path, external(location), constant=False))


def test_external_data_that_is_too_short_is_named(tmp_path: Path) -> None:
    """Length and offset are held against the file."""
    data_file(tmp_path / "numbers")

    with pytest.raises(ModelError, match="a length of 16"):
        load(saved(tmp_path, external("numbers", 16), constant=False))


def test_weights_in_constants_are_not_read(tmp_path: Path) -> None:
    """A weight that a `Constant` node holds in another file costs no memory: 4 TB of it, written nowhere."""
    weight = TensorProto(dims=[10**6, 10**6], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="numbers")
    with (tmp_path / "numbers").open("wb") as file:
        file.truncate(4 * 10**12)
    made = model([node("Constant", [], ["w"], value=weight), node("MatMul", ["x", "w"], ["y"])], shape=(2, 10**6))
    path = tmp_path / "model.onnx"
    path.write_bytes(made.SerializeToString())

    graph = load(path, batch=4)

    assert graph.num_parameters == 10**12
    assert graph.values["y"].shape == (4, 10**6)


def test_a_crash_is_a_message_and_the_next_import_works() -> None:
    """What ends the process of the library ends no other."""
    with isolated() as process:
        os.kill(process.pid, 11)
        with pytest.raises(RefusedError, match=r"crashes on it \(SIGSEGV\)"):
            process.inline(RELU.SerializeToString())

    assert load(RELU).ops[0].kind == "Relu"


MINUTES: tuple[Any, ...] = (
    "RoiAlign",
    (("output_height", 1), ("output_width", 1), ("sampling_ratio", 3000)),
    [np.ones((1, 1, 4, 4), np.float32), np.array([[0, 0, 3, 3]], np.float32), np.array([0])],
    1,
    24,
)
"""An op that reads and makes little, and averages nine million samples one by one."""


def test_an_op_without_end_is_a_message() -> None:
    """A kernel that takes minutes is ended after the processor time allowed."""
    process = Isolated(seconds=0.5)

    with pytest.raises(RefusedError, match="does not come to an end"):
        process.run_kind(*MINUTES)

    process.end()


def test_an_op_that_wants_all_memory_is_a_message() -> None:
    """A window of 4 TB is refused, and the process goes on."""
    with isolated() as process:
        with pytest.raises(RefusedError, match="memory"):
            process.run_kind("HannWindow", (), [np.array(10**12)], 1, 24)
        (array,) = process.run_kind("HannWindow", (), [np.array(4)], 1, 24)

    assert array.shape == (4,)


def test_ops_of_unknown_cost_are_computed_all_the_same() -> None:
    """An op that is not among the cheap ones is folded as before."""
    made = model(
        [node("CumSum", ["s", "zero"], ["t"]), node("Reshape", ["x", "t"], ["y"])],
        weights=[tensor("s", [3, 1], np.int64), tensor("zero", 0, np.int64)],
    )

    assert load(made).values["y"].shape == (3, 4)


def test_an_import_can_be_stopped() -> None:
    """The import asks between two nodes, and while the library works, whether it should go on."""
    with pytest.raises(InterruptedSearchError, match="before the search began"):
        load(RELU, should_stop=lambda: True)

    process = Isolated(seconds=30)
    process.should_stop = lambda: True
    start = time.monotonic()
    with pytest.raises(InterruptedSearchError, match="before the search began"):
        process.run_kind(*MINUTES)
    process.end()

    assert time.monotonic() - start < 5  # it is asked ten times a second


@pytest.mark.parametrize("phase", ["import", "discover"])
def test_a_job_is_stopped_while_it_is_prepared(phase: str) -> None:
    """There is no plan yet to return, so that it is an error, in whatever phase before the search."""
    told: list[str] = []

    with pytest.raises(InterruptedSearchError, match="before the search began"):
        prepare(
            JobRequest("zoo:mlp-xs", gpus=2),
            progress=lambda step: told.append(step.phase),
            should_stop=lambda: phase in told,
        )

    assert told[-1] == phase


def test_a_time_limit_holds_during_the_import() -> None:
    """A search may go on until its first plan for half a minute; so may the import, which is stopped then."""
    with pytest.raises(InterruptedSearchError, match="before the search began"):
        api.solve("zoo:mlp-xs", gpus=2, time_limit=0.5, settings=SearchSettings(overtime_seconds=-1.0))

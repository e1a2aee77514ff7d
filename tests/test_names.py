"""Names from files: wherever they are shown or written they are text, and never obeyed."""

import ast
import json
import re
import shlex
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import onnx
import pytest
import yaml
from onnx import TensorProto, helper, numpy_helper

from autopar.cli import main
from autopar.cluster import PRESETS, parse_cluster
from autopar.cost.stack import parse_stack
from autopar.errors import AutoparError
from autopar.escaping import is_plain, lines
from autopar.frameworks import targets
from autopar.onnx.names import with_plain_names
from autopar.plan import Plan
from tests.fuzz.edges import MARK, NAMES

HOSTILE = tuple(name for name in NAMES if name.strip() and len(name) < 100)
"""Names that break what they are printed into, but those that only are too long or empty."""


def hostile(number: int) -> str:
    """Return a hostile name; names of different numbers are different."""
    return f"{HOSTILE[number % len(HOSTILE)]}{number}"


def model() -> onnx.ModelProto:
    """Return a perceptron whose every name is hostile."""
    layers = len(HOSTILE)
    nodes, weights, value = [], [], hostile(0)
    for layer in range(layers):
        weight, product, out = (hostile(1 + layer + layers * part) for part in range(3))
        weights.append(numpy_helper.from_array(np.ones((8, 8), np.float32), weight))
        nodes.append(helper.make_node("MatMul", [value, weight], [product], name=f"n\n{MARK} {product}"))
        nodes.append(helper.make_node("Relu", [product], [out], name=out))
        value = out
    graph = helper.make_graph(
        nodes,
        f"</title>{hostile(3)}",
        [helper.make_tensor_value_info(hostile(0), TensorProto.FLOAT, ["batch\n\x1b[1m", 8])],
        [helper.make_tensor_value_info(value, TensorProto.FLOAT, None)],
        weights,
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 18)], producer_name="\x1b]0;a\x07", ir_version=9
    )


def command(*arguments: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    """Run a command, and return what it prints on both streams, which holds nothing that a terminal obeys."""
    assert main(arguments) == code
    shown = "".join(capsys.readouterr())

    assert lines(shown) == shown
    assert not re.search(rf"^{MARK}", shown, re.MULTILINE)
    return shown


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the model and with a plan for it."""
    made = tmp_path_factory.mktemp("names")
    onnx.save(model(), made / "model.onnx")
    plan = ("--dp", "2", "--tp", "1", "--pp", "2", "--global-batch", "8", "--no-cache", "-o", str(made))
    assert main(("predict", str(made / "model.onnx"), *plan)) == 0
    return made


def test_names_are_escaped_where_a_model_is_read() -> None:
    """Every one, in subgraphs too; a model without such names is the same object."""
    plain = with_plain_names(model())

    names = [name for node in plain.graph.node for name in (node.name, *node.input, *node.output)]
    assert all(map(is_plain, names))
    assert len(set(names)) == len(
        {name for node in model().graph.node for name in (node.name, *node.input, *node.output)}
    )
    assert with_plain_names(plain) is plain


def test_a_terminal_obeys_no_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plans, their explanations, rules, timelines, and errors that name an op."""
    plan, source = str(folder / "plan.json"), str(folder / "model.onnx")

    command("explain", plan, "--ops", capsys=capsys)
    command("explain", plan, "--tactics", "--no-cache", capsys=capsys)
    command("explain", plan, "--pins", "--no-cache", capsys=capsys)
    command("simulate", plan, "--critical-path", "--no-cache", capsys=capsys)
    command("simulate", plan, "--json", "--no-cache", capsys=capsys)
    command("diff", plan, plan, capsys=capsys)
    command("rules", source, "--no-cache", capsys=capsys)
    command("predict", source, "--dp", "3", "--global-batch", "3", "--set", "a\nb=3", capsys=capsys, code=2)


def test_a_page_has_the_elements_of_any_other(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names are text in it: no script, no handler, no element is theirs."""
    command("report", str(folder / "plan.json"), "-o", str(folder / "report.html"), "--no-cache", capsys=capsys)
    command("predict", "zoo:mlp-xs", "--pp", "2", "--global-batch", "8", "-o", str(folder / "other"), capsys=capsys)
    usual = str(folder / "other" / "plan.json")
    command("report", usual, "-o", str(folder / "usual.html"), capsys=capsys)

    found, known = (Elements.of((folder / name).read_text()) for name in ("report.html", "usual.html"))
    assert found.tags == known.tags
    assert found.attributes == known.attributes
    assert found.scripts == known.scripts


class Elements(HTMLParser):
    """The kinds of elements and attributes of a page, and how many scripts it has."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """See `HTMLParser`."""
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.scripts += tag == "script"

    @classmethod
    def of(cls, text: str) -> "Elements":
        """Return those of a page."""
        page = cls()
        page.feed(text)
        return page


def test_a_trace_is_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Perfetto shows names as text."""
    command("simulate", str(folder / "plan.json"), "--trace", str(folder / "t.json"), "--no-cache", capsys=capsys)

    assert json.loads((folder / "t.json").read_text())["traceEvents"]


@pytest.mark.parametrize("target", targets())
def test_scripts_hold_names_as_text(target: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Python compiles and runs nothing of theirs, a shell finds the words that are meant, TOML and JSON can be read."""
    file = folder / f"{target}.out"
    plan = folder / "plan.json"
    if target in ("accelerate", "trainer", "maxtext", "fsdp"):  # without pipelines, or with equal stages only
        degrees = ("--dp", "4", "--zero", "3", "--global-batch", "8", "--no-cache", "-o", str(folder / "sharded"))
        command("predict", str(folder / "model.onnx"), *degrees, capsys=capsys)
        plan = folder / "sharded" / "plan.json"
    command("export", str(plan), "--to", target, "-o", str(file), "--no-cache", capsys=capsys)

    if target == "onnx":
        onnx.load(file, load_external_data=False)
        return
    text = file.read_text()
    assert lines(text) == text
    assert not re.search(rf"^{MARK}", text, re.MULTILINE)
    if target in ("jax", "pytorch", "torchtitan", "nemo", "fsdp"):
        tree = ast.parse(text)
        compile(tree, str(file), "exec")
        assert not any(isinstance(node, ast.Name) and node.id == MARK for node in ast.walk(tree))
        assert all(isinstance(each, STATEMENTS) for each in tree.body)
    elif target in ("deepspeed", "trainer"):
        json.loads(text)
    elif target in ("accelerate", "maxtext"):
        yaml.safe_load(text)
    else:
        assert all(re.fullmatch(r"--?[\w-]+|[\w.,*|+-]+(=[\w.-]+)?", word) for word in shlex.split(text, comments=True))


STATEMENTS = (ast.Import, ast.ImportFrom, ast.Assign, ast.FunctionDef)
"""What scripts consist of; none has a call at its top."""


@pytest.mark.parametrize("name", HOSTILE)
def test_files_of_ours_take_no_names_with_control_characters(name: str, folder: Path) -> None:
    """All others are names like any, quotes, markup and all."""
    plan = Plan.load(folder / "plan.json")
    cluster = json.dumps({**PRESETS["a100"].to_dict(), "name": name}, ensure_ascii=False)
    stack = json.dumps({"name": name}, ensure_ascii=False)

    for read in (
        partial(parse_cluster, cluster),
        partial(parse_stack, stack),
        partial(Plan.from_json, replace(plan, summary=name).to_json()),
    ):
        refused = pytest.raises(AutoparError, match=r"has control characters|characters are not allowed")
        with nullcontext() if is_plain(name) else refused:
            read()


def test_configurations_of_frameworks_are_told_in_lines_of_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is understood and what is ignored, whatever its keys and values are."""
    config = {f"a\n{MARK}": "\x1b[31m", "train_batch_size": 4, "zero_optimization": {"stage": 1, "b\u202e": "\n"}}
    (tmp_path / "ds.json").write_text(json.dumps(config))

    shown = command(
        "import", str(tmp_path / "ds.json"), "--from", "deepspeed", "--gpus", "2", "--model", "zoo:mlp-xs",
        capsys=capsys,
    )  # fmt: skip

    assert "ignored: a\\u000a" in shown

"""Answers found before: the same question gets the same plan, any other question gets none."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import autopar
from autopar.cluster import load_cluster
from autopar.plan import Plan
from autopar.request import JobRequest
from autopar.result_cache import FOLDER, ResultCache, clear, question_key, usage
from autopar.task import Effort, Task, prepare
from tests.formulations import DIMS

MLP: dict[str, Any] = {"gpus": 2, "dims": DIMS["mlp-xs"], "global_batch": 8}


def _solve(folder: Path, model: str | Path = "zoo:mlp-xs", **changes: Any) -> Plan:
    return autopar.solve(model, cache_dir=folder, **{**MLP, **changes})


def _task(**changes: Any) -> Task:
    return prepare(JobRequest("zoo:mlp-xs", **{**MLP, **changes}))


def _model(path: Path, *, alpha: float = 0.1, width: int = 8, shape: tuple[int, ...] = (0, 2, 4)) -> Path:
    """Write a model with an attribute, a dim, and a constant that is folded into the shape of a value."""
    rng = np.random.default_rng(0)
    weight = numpy_helper.from_array(rng.random((8, width), np.float32), "w")
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["y"]),
            helper.make_node("LeakyRelu", ["y"], ["z"], alpha=alpha),
            helper.make_node("Reshape", ["z", "shape"], ["out"]),
        ],
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["batch", *shape[1:]])],
        [weight, numpy_helper.from_array(np.array(shape, np.int64), "shape")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]), path)
    return path


def _plain(plan: Plan) -> Plan:
    """Return a plan without the mark that it was found before."""
    assert plan.search is not None
    return replace(plan, search=replace(plan.search, cached=False))


def test_the_same_question_gets_the_same_plan(tmp_path: Path) -> None:
    """All of it, runners-up, times of phases and history included; it says where it is from."""
    first, second = _solve(tmp_path), _solve(tmp_path)

    assert first.search is not None
    assert second.search is not None
    assert not first.search.cached
    assert second.search.cached
    assert _plain(second) == first


def test_the_report_says_where_an_answer_is_from(tmp_path: Path) -> None:
    """And how to search again."""
    from autopar.report import format_report

    first, second = format_report(_solve(tmp_path)), format_report(_solve(tmp_path))

    assert "--no-cache" not in first
    assert "--no-cache" in second


def test_without_a_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `--no-cache` has it."""
    monkeypatch.chdir(tmp_path)

    plan = autopar.solve("zoo:mlp-xs", **MLP)

    assert plan.search is not None
    assert not plan.search.cached
    assert list(tmp_path.iterdir()) == []


def test_a_model_is_known_wherever_it_lies(tmp_path: Path) -> None:
    """The key is its content; the plan names the path it was asked for."""
    here, there = _model(tmp_path / "here.onnx"), _model(tmp_path / "there.onnx")

    _solve(tmp_path, here, dims={})
    plan = _solve(tmp_path, there, dims={})

    assert plan.search is not None
    assert plan.search.cached
    assert plan.model.source == str(there)
    assert all(other.model.source == str(there) for other in plan.alternatives)


@pytest.mark.parametrize("changed", [{"alpha": 0.2}, {"width": 16, "shape": (0, 4, 4)}, {"shape": (0, 4, 2)}])
def test_a_changed_model_is_another_question(tmp_path: Path, changed: dict[str, Any]) -> None:
    """At the same path: one attribute, one dim, one initializer that is folded into a shape."""
    path = _model(tmp_path / "model.onnx")
    before = _solve(tmp_path, path, dims={})

    _model(path, **changed)
    after = _solve(tmp_path, path, dims={})

    assert after.search is not None
    assert not after.search.cached
    assert after.model.sha256 != before.model.sha256


def test_a_constant_in_a_file_beside_the_model_counts(tmp_path: Path) -> None:
    """The model's own file stays as it is, to the byte; trained tensors beside it may change."""
    path = _model(tmp_path / "model.onnx")
    model = onnx.load(path)
    onnx.external_data_helper.convert_model_to_external_data(
        model, all_tensors_to_one_file=False, size_threshold=0, convert_attribute=False
    )
    onnx.save(model, path)
    data = path.read_bytes()
    _solve(tmp_path, path, dims={})

    weights = tmp_path / "w"
    weights.write_bytes(bytes(weights.stat().st_size))
    retrained = _solve(tmp_path, path, dims={})
    (tmp_path / "shape").write_bytes(np.array((0, 4, 2), np.int64).tobytes())
    reshaped = _solve(tmp_path, path, dims={})

    assert path.read_bytes() == data
    assert retrained.search is not None
    assert reshaped.search is not None
    assert retrained.search.cached
    assert not reshaped.search.cached


@pytest.mark.parametrize(
    "changed",
    [
        {"gpus": 4},
        {"global_batch": 16},
        {"mode": "infer"},
        {"cluster": "a100"},
        {"cluster": replace(load_cluster("h100"), name="mine")},
        {"memory_limit": 1e9},
        {"optimizer": "sgd"},
        {"loss": "mean"},
        {"precision": "fp32"},
        {"dims": {**DIMS["mlp-xs"], "num_layers": 3}},
    ],
    ids=repr,
)
def test_a_changed_job_is_another_question(changed: dict[str, Any]) -> None:
    """Whatever of it changes."""
    effort = Effort()

    assert question_key(_task(**changed), effort) != question_key(_task(), effort)


@pytest.mark.parametrize("changed", [{"solver": "highs"}, {"top_k": 2}, {"seed": 1}])
def test_a_changed_effort_is_another_question(changed: dict[str, Any]) -> None:
    """But for the time limit, which is compared."""
    task = _task()

    assert question_key(task, replace(Effort(), **changed)) != question_key(task, Effort())
    assert question_key(task, Effort(time_limit=3.0)) == question_key(task, Effort())


def test_changed_code_is_another_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of an autopar of other source are not given."""
    task = _task()
    before = question_key(task, Effort())

    monkeypatch.setattr("autopar.result_cache.source_digest", lambda: "another")

    assert question_key(task, Effort()) != before


def test_what_a_limit_cut_answers_for_no_longer_one(tmp_path: Path) -> None:
    """A search of 2 s answers for 2 s and 1 s; one that ended by itself for any limit and none."""
    plan, task = autopar.solve("zoo:mlp-xs", **MLP), _task()
    assert plan.search is not None
    cut = replace(plan, search=replace(plan.search, termination="time limit"))

    ResultCache(tmp_path, task, Effort(time_limit=2.0)).keep(cut)
    known = [ResultCache(tmp_path, task, Effort(time_limit=limit)).answer() for limit in (1.0, 2.0, 3.0, None)]
    ResultCache(tmp_path, task, Effort(time_limit=9.0)).keep(plan)
    later = [ResultCache(tmp_path, task, Effort(time_limit=limit)).answer() for limit in (1.0, 99.0, None)]
    ResultCache(tmp_path, task, Effort(time_limit=5.0)).keep(cut)

    assert [answer is not None for answer in known] == [True, True, False, False]
    assert all(answer is not None and _plain(answer) == plan for answer in later)
    assert ResultCache(tmp_path, task, Effort()).answer() is not None, "the complete answer stays"


def test_what_was_interrupted_is_not_kept(tmp_path: Path) -> None:
    """Nobody can tell how far another search would come."""
    plan = autopar.solve("zoo:mlp-xs", **MLP)
    assert plan.search is not None
    stopped = replace(plan, search=replace(plan.search, termination="interrupted"))

    ResultCache(tmp_path, _task(), Effort()).keep(stopped)

    assert usage(tmp_path).plans == 0


@pytest.mark.parametrize("damage", [b"", b"{", b'{"version":1}', b"\xff\xfe"])
def test_a_damaged_file_is_searched_again(tmp_path: Path, damage: bytes) -> None:
    """And mended."""
    first = _solve(tmp_path)
    (path,) = (tmp_path / FOLDER).iterdir()
    path.write_bytes(damage)

    second, third = _solve(tmp_path), _solve(tmp_path)

    assert second.search is not None
    assert third.search is not None
    assert not second.search.cached
    assert third.search.cached
    assert (second.blocks, second.stages, second.objective) == (first.blocks, first.stages, first.objective)


def test_a_flipped_digit_is_noticed(tmp_path: Path) -> None:
    """A file that can still be read, but is not what was written, counts as absent."""
    plan = _solve(tmp_path)
    (path,) = (tmp_path / FOLDER).iterdir()
    text = path.read_text()
    assert "objective" in text
    path.write_text(text.replace('objective\\": ', 'objective\\": 1', 1))
    assert path.read_text() != text

    again = _solve(tmp_path)

    assert again.search is not None
    assert not again.search.cached
    assert again.objective == plan.objective


def test_the_cache_can_be_measured_and_cleared(tmp_path: Path) -> None:
    """Only plans go; the rules in the same folder stay."""
    _solve(tmp_path)
    others = [path for path in tmp_path.iterdir() if path.name != FOLDER]

    held = clear(tmp_path)

    assert held.plans == 1
    assert held.bytes > 1000
    assert usage(tmp_path).plans == 0
    assert others
    assert all(path.exists() for path in others)


def test_what_is_not_asked_for_longest_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for two plans, the third takes the place of the one asked for least recently."""
    plan = autopar.solve("zoo:mlp-xs", **MLP)
    task, efforts = _task(), [Effort(seed=seed) for seed in range(3)]
    for age, effort in ((300, efforts[0]), (200, efforts[1])):
        ResultCache(tmp_path, task, effort).keep(plan)
        path = tmp_path / FOLDER / f"{question_key(task, effort)}.json"
        _age(path, age)
    monkeypatch.setattr("autopar.result_cache.MAX_BYTES", int(2.5 * path.stat().st_size))
    assert ResultCache(tmp_path, task, efforts[0]).answer() is not None, "asking makes it the newest"

    ResultCache(tmp_path, task, efforts[2]).keep(plan)

    known = [ResultCache(tmp_path, task, effort).answer() is not None for effort in efforts]
    assert known == [True, False, True]


def _age(path: Path, seconds: float) -> None:
    import os

    status = path.stat()
    os.utime(path, (status.st_atime - seconds, status.st_mtime - seconds))


def test_a_folder_that_cannot_be_written_costs_no_plan(tmp_path: Path) -> None:
    """The caller is told, and has the plan."""
    plan = autopar.solve("zoo:mlp-xs", **MLP)
    (tmp_path / FOLDER).write_text("in the way")

    trouble = ResultCache(tmp_path, _task(), Effort()).keep(plan)

    assert "cannot write" in trouble

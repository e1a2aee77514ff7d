"""Remarks: figures that cannot be real, and what a reader should know before believing a prediction."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import autopar
from autopar.cluster import PRESETS, Cluster, load_cluster
from autopar.cost import CostModel, load_policy, load_stack
from autopar.degrees import Degrees
from autopar.plan import Plan, Simulated, StageMemory
from autopar.prediction import Prediction
from autopar.remarks import GREATEST_MFU, remarks
from autopar.report import format_explain, format_report, format_timeline
from autopar.report.prediction import format_prediction
from autopar.workload import open_workload

_DIMS = {"hidden": 8, "num_layers": 2}


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    """A tiny model on two devices."""
    return autopar.predict("zoo:mlp-xs", Degrees(dp=2, global_batch=4), dims=_DIMS, stack="ideal")


def _remarks(plan: Plan, cluster: Cluster | None = None, stack: str = "ideal", **changed: Any) -> dict[str, str]:
    """Return the remarks on a plan of the tiny model whose figures are changed."""
    assert plan.simulated is not None
    folded = open_workload("zoo:mlp-xs", dims=_DIMS).folded(plan.microbatch)
    costs = CostModel(cluster or load_cluster("h100"), load_policy("mixed"), load_stack(stack))
    found = remarks(plan, replace(plan.simulated, **changed), folded, costs)
    return {remark.kind: remark.text for remark in found}


@pytest.mark.parametrize(
    ("peak", "kind", "words"),
    [
        (0.949, "", ""),
        (0.95, "memory", "little memory to spare: a device takes 71.5 GB, 95.0 % of the limit"),
        (1.2, "fit", "does not fit: a device takes 90.4 GB, over the limit of 75.3 GB"),
        (20.0, "memory", "1.51 TB per device is more than any device has (288 GB)"),
    ],
)
def test_memory_that_is_short_or_impossible_is_said(prediction: Prediction, peak: float, kind: str, words: str) -> None:
    """From 95 % of the limit on, above it, and above what any device has."""
    limit = prediction.plan.job.memory_limit

    found = _remarks(prediction.plan, stages=(StageMemory(peak * limit, {}),))

    assert {own: text for own, text in found.items() if own in ("memory", "fit")}.keys() == ({kind} if kind else set())
    assert words in found.get(kind, "")


@pytest.mark.parametrize(
    ("device", "mfu", "said"),
    [
        ("h100", 0.62, ""),
        ("h100", 0.63, "an MFU above the 62.5 % that is published for H100-SXM5-80GB"),
        ("a100", 0.63, ""),
        ("rtx4090", 0.71, ""),
        ("rtx4090", 0.72, "an MFU above the 71.5 % that is published for any device"),
        ("gb200", 0.5, "published for GB200-186GB"),
        ("h100", 0.0, "an MFU of 0"),
    ],
)
def test_an_mfu_above_all_that_is_published_is_said(prediction: Prediction, device: str, mfu: float, said: str) -> None:
    """By device, or of any device where nothing is published for it."""
    found = _remarks(prediction.plan, load_cluster(device), mfu=mfu)

    assert said in found.get("mfu", "") if said else "mfu" not in found


def test_inference_and_other_precisions_are_not_held_against_published_training(prediction: Prediction) -> None:
    """What is published are training steps in 16-bit numbers."""
    job = prediction.plan.job

    for other in (replace(job, mode="infer"), replace(job, precision="fp32")):
        assert "mfu" not in _remarks(replace(prediction.plan, job=other), mfu=2 * GREATEST_MFU)


def _renamed(name: str) -> Cluster:
    preset = PRESETS["h100"]
    return replace(preset, name=name, device=replace(preset.device, name=name))


@pytest.mark.parametrize(
    ("cluster", "stack", "said"),
    [
        (PRESETS["h100"], "ideal", "for H100-SXM5-80GB there is --stack "),
        (PRESETS["l4"], "ideal", "not calibrated on L4-24GB: it follows from the figures of the cluster alone"),
        (_renamed("mine"), "ideal", "not calibrated on mine"),
        (PRESETS["h100"], "fsdp-eager-h100", "calibrated on 8 to 512 GPUs, not on 2"),
        (PRESETS["h100"], "zero-bubble-a100", "stack zero-bubble-a100 is, on A100-SXM4-80GB, A100-SXM4-40GB"),
        (PRESETS["a100"], "megatron-a100", ""),
    ],
)
def test_what_is_not_calibrated_is_said(prediction: Prediction, cluster: Cluster, stack: str, said: str) -> None:
    """A stack without a fit, one that was fitted on other devices, and one that was fitted on more of them."""
    found = _remarks(prediction.plan, cluster, stack)

    assert said in found.get("calibration", "") if said else "calibration" not in found


def test_ops_whose_cost_is_a_guess_are_said(tmp_path: Path) -> None:
    """TopK sorts, and is priced by its bytes; beside a product that takes most of the time it is not worth a word."""
    nodes = {
        "sorting": "values, indices = TopK(x, k)",
        "multiplying": "h = MatMul(x, w)\n values, indices = TopK(h, k)",
    }
    found = {}
    for name, text in nodes.items():
        model = onnx.parser.parse_model(
            f"""<ir_version: 8, opset_import: ["" : 18]>
            main (float[N, 1024] x) => (float[N, 4] values, int64[N, 4] indices) <int64[1] k = {{4}}> {{ {text} }}"""
        )
        weight = np.zeros((1024, 1024), np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
        onnx.save(model, tmp_path / f"{name}.onnx")
        degrees = Degrees(global_batch=1 << 16, microbatch=1 << 16)
        plan = autopar.predict(tmp_path / f"{name}.onnx", degrees, mode="infer", stack="ideal").plan
        found[name] = [remark.text for remark in _simulated(plan).remarks if remark.kind == "cost"]

    assert found["sorting"] == ["100 % of the computing time is of TopK, priced by the bytes they move alone"]
    assert not found["multiplying"]


def test_remarks_are_in_every_answer(prediction: Prediction) -> None:
    """Reports, explanations, timelines and JSON; a plan file of before has none."""
    plan, said = prediction.plan, "step time not calibrated"

    texts = (
        format_report(plan),
        format_explain(plan),
        format_prediction(plan, prediction.timeline),
        format_timeline(prediction.timeline, _simulated(plan).remarks),
        plan.to_json().decode(),
    )

    assert all(said in text for text in texts)
    assert Plan.from_json(plan.to_json()) == plan
    silent = replace(plan, simulated=replace(_simulated(plan), remarks=()))
    assert b"remarks" not in silent.to_json()


def _simulated(plan: Plan) -> Simulated:
    assert plan.simulated is not None
    return plan.simulated

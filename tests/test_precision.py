"""Precisions below 16 bits: which products run in them, what is stored, what casts cost, what exports ask for."""

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from autopar import predict, solve
from autopar.cluster import Device
from autopar.cluster.presets import PRESETS
from autopar.cost import CostModel, load_policy
from autopar.cost.formats import FORMATS
from autopar.degrees import Degrees
from autopar.errors import ClusterError, JobError
from autopar.folding.fold import Folded
from autopar.frameworks.configurations import parse_configuration
from autopar.ir.graph import Cast, Linear, LinearProduct, Op, parse_linear
from autopar.ir.linear import linear_weights, quantized_values
from autopar.precisions import in_other_precisions
from autopar.prediction import Predictor
from autopar.report.precisions import format_precisions
from autopar.workload import Workload, open_workload

H100 = PRESETS["h100"]
LLAMA = {"num_layers": 2, "hidden": 256, "heads": 4, "kv_heads": 4, "ffn": 512, "seq": 128, "vocab": 1024}
LAYER = 4 * 256 * 256 + 3 * 256 * 512
"""Elements of the matrices of one layer."""
HEAD = 2 * 1024 * 256
"""Elements of the embedding and of the projection to the vocabulary."""
NORMS = 5 * 256


@cache
def llama(mode: str = "train") -> Workload:
    return open_workload("zoo:llama3-8b", dims=LLAMA, mode=mode)


def folded(mode: str = "train") -> Folded:
    return llama(mode).folded(2)


def test_the_seven_matrices_of_a_layer_are_quantized_and_the_head_is_not() -> None:
    graph = folded().graph

    found = Counter(op.linear.product for op in graph.ops if op.linear is not None)

    assert found == dict.fromkeys(LinearProduct, 2 * 7)
    assert not any("logits" in name or "embed" in name for name in linear_weights(graph))
    assert not any(op.linear for op in graph.ops if "Attention" in op.kind)


def test_a_router_stays_in_16_bits_and_experts_do_not() -> None:
    dims = {"num_layers": 2, "seq": 64}
    graph = open_workload("zoo:qwen3-30b-a3b", dims=dims).folded(2).graph

    weights = linear_weights(graph)

    assert sum("experts" in name for name in weights) == 2 * 3
    assert not any("gate.weight" in name and "experts" not in name for name in weights)


def test_each_operand_is_cast_once_in_a_phase() -> None:
    graph = folded().graph
    casts = {op.name: op.linear.cast for op in graph.ops if op.linear is not None}

    layer = {name.removeprefix("layers.1."): cast for name, cast in casts.items() if name.startswith("layers.1.")}

    # the norm may write what three products read; attention may not write what one reads
    assert [layer[f"attn.{name}"] for name in "qkv"] == [Cast.BY_MAKER, Cast.BEFORE, Cast.BEFORE]
    assert layer["attn.out"] is Cast.OWN
    assert [layer[f"mlp.{name}"] for name in ("gate", "up", "down")] == [Cast.BY_MAKER, Cast.BEFORE, Cast.BY_MAKER]
    # the gradient of a residual is cast by the input gradient, and read again by the weight gradient
    gradients = {op.linear.product: op.linear for op in graph.ops if op.origin == "layers.1.mlp.down" and op.linear}
    assert gradients[LinearProduct.INPUT_GRADIENT] == Linear(LinearProduct.INPUT_GRADIENT, Cast.OWN, kept=True)
    assert gradients[LinearProduct.WEIGHT_GRADIENT].cast is Cast.BEFORE


def test_what_only_linear_layers_read_is_stored_quantized() -> None:
    names = {name.removeprefix("layers.1.") for name in quantized_values(folded().graph) if "layers.1." in name}

    assert {"attn_norm", "mlp_norm", "mlp.gated"} <= names
    assert "attn.core.merge" not in names  # attention needs its result in its gradient
    assert "mlp.gate" not in names


@pytest.mark.parametrize(
    ("precision", "weight"),
    [("bf16", 2.0), ("fp8", 4.0), ("fp8,weights=low", 2.0), ("mxfp8", 2 + 2 * (1 + 1 / 32)), ("nvfp4", 3.125)],
)
def test_bytes_of_parameters_in_training(precision: str, weight: float) -> None:
    """Weights of linear layers in 16 bits and quantized along either dim; moments and master copies as ever."""
    graph = folded().graph
    sizes = load_policy(precision).graph_element_bytes(graph)

    total = sum(sizes[value.name] * value.size for value in graph.parameters)

    assert total == pytest.approx(2 * weight * LAYER + 2 * (HEAD + NORMS))
    assert sizes["layers.1.mlp.up.weight.m"] == 6.0


@pytest.mark.parametrize(("precision", "weight"), [("int8", 1.0), ("fp8", 1.0), ("nvfp4", 0.5625), ("bf16", 2.0)])
def test_bytes_of_parameters_in_inference(precision: str, weight: float) -> None:
    graph = folded("infer").graph
    sizes = load_policy(precision).graph_element_bytes(graph)

    total = sum(sizes[value.name] * value.size for value in graph.parameters)

    assert total == pytest.approx(2 * weight * LAYER + 2 * (HEAD + NORMS))


def test_weights_alone_are_not_trained_in_8_bits() -> None:
    graph = folded().graph

    assert load_policy("int8").graph_element_bytes(graph) == load_policy("bf16").graph_element_bytes(graph)


def test_primary_weights_are_gathered_in_8_bits() -> None:
    graph = folded().graph

    assert load_policy("fp8").graph_wire_bytes(graph)["layers.0.mlp.up.weight"] == 2.0
    assert load_policy("fp8,weights=low").graph_wire_bytes(graph)["layers.0.mlp.up.weight"] == 1.0
    assert load_policy("fp8,weights=low").graph_wire_bytes(graph)["logits.weight"] == 2.0


def test_activations_kept_by_a_layer() -> None:
    """Per token of width h and inner width f, in bytes of fp8 and bf16, as Transformer Engine keeps them."""
    model, samples, tokens = Predictor(llama()), 1, 128
    degrees = Degrees(dp=1, microbatch=samples, global_batch=samples)

    def kept(precision: str) -> float:
        found = model.predict(degrees, H100, policy=load_policy(precision))
        assert found.plan.simulated is not None
        return found.plan.simulated.stages[0].breakdown["activations"]

    h, f, layers = 256, 512, 2
    # two outputs of norms and the gated value in 8 bits instead of 16; a copy of the result of attention beside it
    saved = layers * tokens * ((2 * h + f) * (2 - 1) - h)
    assert kept("bf16") - kept("fp8") == pytest.approx(saved)


def test_seconds_of_a_product_and_of_its_cast() -> None:
    m, k, n = 8192, 4096, 4096
    shapes = [np.array([[m, k]]), np.array([[k, n]])], [np.array([[m, n]])]
    sizes = dict.fromkeys(("x", "w", "y"), 2.0)

    def seconds(precision: str, cast: Cast) -> float:
        op = Op("y", "MatMul", ("x", "w"), ("y",), linear=Linear(LinearProduct.FORWARD, cast, kept=True))
        return float(CostModel(H100, load_policy(precision)).op_seconds(op, *shapes, sizes)[0])

    device = H100.device
    bandwidth = device.memory_bandwidth * device.bandwidth_efficiency * 1.1
    cast = seconds("fp8", Cast.OWN) - seconds("fp8", Cast.BEFORE)
    assert cast == pytest.approx(m * k * (2 + 2) / bandwidth + 0.3 * device.launch)
    assert seconds("fp8", Cast.BY_MAKER) == seconds("fp8", Cast.BEFORE)
    current = seconds("fp8-current", Cast.BY_MAKER) - seconds("fp8-current", Cast.BEFORE)
    assert current == pytest.approx(m * k * (2 * 2 + 2) / bandwidth + 2 * 0.3 * device.launch)
    peak = 2 * m * k * n / (1979e12 * device.efficiency("fp8"))
    assert seconds("fp8", Cast.BEFORE) == pytest.approx(peak, rel=0.1)
    assert seconds("bf16", Cast.OWN) == seconds("bf16", Cast.BEFORE)


@pytest.mark.slow
def test_the_formula_agrees_with_the_simulator_below_16_bits(cache_dir: Path) -> None:
    dims = {"num_layers": 2, "seq": 2048}
    plans = {
        precision: solve(
            "zoo:llama3-8b",
            gpus=8,
            cluster="h100",
            dims=dims,
            global_batch=16,
            precision=precision,
            cache_dir=cache_dir,
        )
        for precision in ("bf16", "fp8", "mxfp8")
    }

    steps = {name: plan.simulated.step_seconds for name, plan in plans.items() if plan.simulated is not None}
    for name, plan in plans.items():
        assert plan.objective == pytest.approx(steps[name], rel=0.05)  # two layers: the last bucket counts
        assert plan.job.precision == load_policy(name).name


def test_a_step_in_8_bits_is_faster(cache_dir: Path) -> None:
    degrees, dims = Degrees(dp=8, zero=1, microbatch=2, global_batch=16), {"num_layers": 2, "seq": 2048}

    seconds = [
        predict(
            "zoo:llama3-8b", degrees, cluster="h100", stack="ideal", precision=name, dims=dims, cache_dir=cache_dir
        ).timeline.step_seconds
        for name in ("fp8", "mxfp8", "bf16")
    ]

    assert seconds == sorted(seconds)
    assert seconds[2] > 1.1 * seconds[0]


def test_a_plan_in_every_precision_of_its_devices(cache_dir: Path) -> None:
    found = Predictor(llama(), cache_dir).predict(Degrees(dp=4, zero=1, microbatch=1, global_batch=8), H100)

    effects = in_other_precisions(found.plan, cache_dir=cache_dir)

    names = [each.precision for each in effects]
    assert names[0] == "mixed"
    assert {"fp32", "tf32", "fp8", "mxfp8", "fp8,weights=low"} <= set(names)
    assert not {"nvfp4", "int8"} & set(names)  # no fp4 on Hopper; weights alone are not trained in 8 bits
    by_name = dict(zip(names, effects, strict=True))
    assert by_name["mixed"].step_seconds == pytest.approx(found.timeline.step_seconds)
    assert by_name["fp8,weights=low"].peak_bytes < by_name["fp8"].peak_bytes
    assert by_name["tf32"].step_seconds < by_name["fp32"].step_seconds
    text = format_precisions(effects)
    assert "1.00 x" in text
    assert "nothing was changed" in text


def test_names_and_changes_of_a_precision() -> None:
    assert load_policy("bf16").name == "mixed"
    changed = load_policy("fp8, reduce=16,moments=16, weights=low")
    assert changed.name == "fp8,weights=low,reduce=16,moments=16"
    assert load_policy(changed.name) == changed
    assert (changed.gradient, changed.gradient_wire, changed.moment) == (4.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fp7", "no precision 'fp7'"),
        ("bf16,weights=low", "quantizes no weights"),
        ("fp8,weights=4", "weights is '4'"),
        ("fp8,speed=2", "no 'speed'"),
        ("fp8,reduce=16,reduce=32", "twice"),
    ],
)
def test_a_precision_that_is_none(name: str, says: str) -> None:
    with pytest.raises(JobError, match=says) as caught:
        load_policy(name)
    assert caught.value.hint


def test_a_device_without_such_numbers_says_so() -> None:
    with pytest.raises(ClusterError, match="no peak for 'fp8' numbers"):
        CostModel(PRESETS["a100"], load_policy("fp8"))
    with pytest.raises(ClusterError, match="no peak for 'fp4' numbers"):
        CostModel(H100, load_policy("nvfp4"))


@pytest.mark.parametrize("precision", [*FORMATS, "fp8,weights=low", "bf16,gradients=16,reduce=16", "bf16,moments=16"])
def test_megatron_takes_a_precision_and_gives_it_back(precision: str, cache_dir: Path) -> None:
    cluster = PRESETS["tpu-v6e" if precision == "int8-current" else "b200"]
    degrees = Degrees(dp=4, zero=1, microbatch=1, global_batch=8)
    found = Predictor(llama(), cache_dir).predict(degrees, cluster, policy=load_policy(precision))

    exported = found.plan.export("megatron")

    if precision not in ("int8", "int8-current"):
        read = parse_configuration(exported.data.decode(), "megatron", gpus=4)
        assert read.precision == load_policy(precision).name
        assert not any("linear layers" in lost for lost in exported.lost)
    else:
        assert any(precision in lost for lost in exported.lost)


def test_text_of_a_mark_is_read_back() -> None:
    for product in LinearProduct:
        for cast in Cast:
            for kept in (False, True):
                mark = Linear(product, cast, kept)
                assert parse_linear(str(mark)) == mark
    with pytest.raises(ValueError, match="nothing"):
        parse_linear("nothing/own")


def test_layers_stay_equal_whatever_the_head_is() -> None:
    """A head of an odd size is no linear layer, and no reason to take the last layer for one."""
    chain = open_workload("zoo:llama3-8b", dims={**LLAMA, "num_layers": 4, "vocab": 1001}, mode="infer").folded(2).chain

    assert len(set(chain[1:-1])) == 1


def test_every_field_of_quantized_numbers_counts() -> None:
    op = Op("y", "MatMul", ("x", "w"), ("y",), linear=Linear(LinearProduct.FORWARD, Cast.BEFORE, kept=False))
    sizes, shape = dict.fromkeys(("x", "w", "y"), 2.0), np.array([[4096, 4096]])

    def seconds(device: Device) -> float:
        costs = CostModel(replace(PRESETS["b200"], device=device), load_policy("nvfp4"))
        return float(costs.op_seconds(op, [shape, shape], [shape], sizes)[0])

    b200 = PRESETS["b200"].device
    slower = replace(b200, peaks=tuple((name, peak / 2 if name == "fp4" else peak) for name, peak in b200.peaks))
    worse = replace(b200, efficiencies=(("fp4", 0.3),))
    assert seconds(slower) > 1.5 * seconds(b200)
    assert seconds(worse) > 1.5 * seconds(b200)
    with pytest.raises(ClusterError, match="no peak for 'fp2'"):
        replace(b200, efficiencies=(("fp2", 0.3),))

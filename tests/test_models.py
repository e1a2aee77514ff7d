"""The zoo: counts as published, graphs that are valid, run, and depend on no batch size."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from autopar import models
from autopar.errors import ModelError
from autopar.models.builder import Builder
from autopar.models.deepseek import DeepseekConfig, experts
from autopar.models.mixtral import MixtralConfig, moe
from autopar.onnx import load

TINY: dict[str, dict[str, Any]] = {
    "gpt2": {"num_layers": 2, "hidden": 24, "heads": 4, "seq": 6, "vocab": 40},
    "llama3-8b": {"num_layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 40, "seq": 6, "vocab": 44},
    "bert-base": {"num_layers": 2, "hidden": 24, "heads": 4, "seq": 6, "vocab": 40},
    "mixtral-8x7b": {
        "num_layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 40, "seq": 6, "vocab": 44, "experts": 4,
    },
    "vit-b16": {"num_layers": 2, "hidden": 24, "heads": 4, "patch": 8, "image_size": 16, "classes": 10},
    "resnet50": {"blocks": (1, 2), "channels": 4, "image_size": 32, "classes": 10},
    "deepseek-moe-16b": {
        "num_layers": 3, "hidden": 16, "heads": 4, "kv_heads": 4, "dense_ffn": 40, "ffn": 8, "seq": 6, "vocab": 44,
        "experts": 8, "top_k": 2,
    },
    "unet-sd1": {
        "channels": 8, "factors": (1, 2), "blocks": 1, "heads": 2, "context": 6, "tokens": 3, "image_size": 8,
        "groups": 4,
    },
    "flux-12b": {
        "num_layers": 1, "single_layers": 1, "hidden": 32, "heads": 2, "axes": (4, 4, 8), "latent": 3, "image_size": 6,
        "tokens": 5, "context": 12, "pooled": 7,
    },
    "wan-1.3b": {
        "num_layers": 2, "hidden": 32, "heads": 2, "ffn": 40, "latent": 3, "frames": 2, "height": 4, "width": 6,
        "tokens": 5, "context": 12,
    },
    "mlp-xs": {"num_layers": 3, "hidden": 16},
}  # fmt: skip
"""One small model of every family."""

EXACT = {
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616, "llama2-13b": 13_015_864_320, "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "llama3-405b": 405_853_388_800,
    "bert-base": 109_514_298, "bert-large": 335_174_458,
    "mixtral-8x7b": 46_702_792_704, "mixtral-8x22b": 140_630_071_296,
    "vit-b16": 86_567_656, "vit-l16": 304_326_632, "vit-h14": 632_045_800,
    "resnet50": 25_557_032, "resnet101": 44_549_160, "resnet152": 60_192_808,
    "wide-resnet50-2": 68_883_240, "wide-resnet101-2": 126_886_696,
    "deepseek-moe-16b": 16_375_728_128,
    "unet-sd1": 859_520_964, "flux-12b": 11_901_408_320, "wan-1.3b": 1_418_996_800, "wan-14b": 14_288_491_584,
    "llama3.1-8b": 8_030_261_248, "llama3.1-70b": 70_553_706_496, "llama3.1-405b": 405_853_388_800,
    "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560, "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880, "deepseek-v3": 671_026_419_200 - 58 * 256, "kimi-k2": 1_026_408_232_448 - 60 * 384,
    "glm-4.5-air": 106_852_251_264 - 45 * 128,  # without the biases of the choice of experts
    "glm-4.5": 358_337_791_296 - 5_539_962_112 - 90 * 160,  # and without the module that predicts further tokens
    "nemotron3-nano-30b-a3b": 31_577_937_344, "qwen3-next-80b-a3b": 79_674_391_296,
    "gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672, "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320, "gemma3-12b": 11_766_034_176, "gemma3-27b": 27_009_346_304,
    "mamba-2.8b": 2_768_345_600, "falcon-mamba-7b": 7_272_665_088, "jamba-v0.1": 51_570_323_328,
    "bloom-176b": 176_247_271_424, "t5-11b": 11_307_321_344, "flan-t5-xxl": 11_135_332_352,
    "whisper-large": 1_543_304_960 - 1500 * 1280, "whisper-large-v3": 1_543_490_560 - 1500 * 1280,  # fixed positions
    "dit-xl-2": 675_129_632 - 256 * 1152, "sd3-medium": 2_028_328_000, "sd3.5-medium": 2_243_171_520,
    "sd3.5-large": 8_056_627_520,  # fixed places of patches left out
    "mlp-xs": 8 * 512**2, "mlp-small": 16 * 8192**2, "mlp-medium": 64 * 16384**2, "mlp-large": 96 * 32768**2,
}  # fmt: skip
"""Counts of the released checkpoints."""

ROUNDED = {
    "grok-1": (316, 0), "llama4-scout": (107.8, 1), "llama4-maverick": (401, 0),
    "nemotron4-15b": (15.6, 1), "nemotron4-340b": (341, 0),
    "jamba-1.5-large": (398.6, 1), "dit-l-2": (0.458, 3),
    "mamba2-2.7b": (2.7, 1), "bamba-9b": (9.78, 2), "nemotron-h-8b": (8.1, 1), "nemotron-h-56b": (56, 0),
    "gpt3-125m": (0.125, 3), "gpt3-350m": (0.36, 2), "gpt3-760m": (0.76, 2), "gpt3-xl": (1.3, 1), "gpt3-2.7b": (2.7, 1),
    "gpt3-6.7b": (6.7, 1), "gpt3-13b": (13, 0), "gpt3-175b": (174.6, 1),
    "megatron-1.7b": (1.7, 1), "megatron-3.6b": (3.6, 1), "megatron-7.5b": (7.5, 1), "megatron-18b": (18.4, 1),
    "megatron-39b": (39.1, 1), "megatron-76b": (76.1, 1), "megatron-145b": (145.6, 1), "megatron-310b": (310.1, 1),
    "megatron-530b": (529.6, 1), "megatron-1t": (1008.0, 1),
    "wide-resnet-250m": (0.25, 2), "wide-resnet-500m": (0.5, 2), "wide-resnet-1b": (1.0, 1), "wide-resnet-2b": (2.0, 1),
    "wide-resnet-4b": (4.0, 1), "wide-resnet-6.8b": (6.7, 1), "wide-resnet-13b": (13, 0),
}  # fmt: skip
"""Published only rounded: billions and decimals. (GPT-3 names its second model 350M; its table's shape gives 356M.
Grok-1 is called 314B; its shapes give 315.7 of the 316.5 billion of the PyTorch port, which holds the embedding twice.
Jamba 1.5 Large is called 398B.)
"""


def feeds(model: Any, batch: int, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Return random inputs; tokens cover the whole vocabulary of the tiny models."""
    from onnx import TensorProto

    rng = np.random.default_rng(seed)
    arrays: dict[str, NDArray[Any]] = {}
    for item in model.graph.input:
        shape = (batch, *(dim.dim_value for dim in item.type.tensor_type.shape.dim[1:]))
        is_tokens = item.type.tensor_type.elem_type == TensorProto.INT64
        arrays[item.name] = rng.integers(0, 40, shape) if is_tokens else rng.normal(size=shape).astype(np.float32)
    return arrays


def run(model: Any, data: dict[str, NDArray[Any]], values: dict[str, NDArray[Any]]) -> NDArray[Any]:
    """Run a model by the reference evaluator, its weights given as inputs."""
    from onnx.reference import ReferenceEvaluator

    return np.asarray(ReferenceEvaluator(with_weight_inputs(model)).run(None, data | values)[0])


def with_weight_inputs(model: Any) -> Any:
    """Return the model with its absent weights turned into inputs."""
    from onnx import ModelProto, TensorProto, helper

    copy = ModelProto()
    copy.CopyFrom(model)
    absent = [tensor for tensor in copy.graph.initializer if tensor.data_location == TensorProto.EXTERNAL]
    for tensor in absent:
        copy.graph.initializer.remove(tensor)
        copy.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return copy


def test_every_model_has_a_published_count() -> None:
    """The two tables above cover the zoo, so no model escapes the next two tests."""
    assert set(models.names()) == EXACT.keys() | ROUNDED.keys()


@pytest.mark.parametrize("name", EXACT)
def test_parameters_equal_the_published_count(name: str) -> None:
    assert models.spec(name).num_parameters == EXACT[name]
    assert models.num_parameters(models.build(name)) == EXACT[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_parameters_round_to_the_published_count(name: str) -> None:
    count = models.num_parameters(models.build(name))

    assert models.spec(name).num_parameters == count
    assert round(count / 1e9, ROUNDED[name][1]) == ROUNDED[name][0]


def test_bert_is_the_published_encoder_with_a_head_in_place_of_the_pooler() -> None:
    """109,482,240 with pooler (d^2 + d); the head adds d^2 + d, a norm (2 d) and a bias per token."""
    hidden, vocab = 768, 30522

    assert models.spec("bert-base").num_parameters == 109_482_240 + 2 * hidden + vocab


@pytest.mark.parametrize("name", models.names())
def test_spec_agrees_with_the_graph(name: str) -> None:
    """Input shape and number of layers are those of the spec; dim 0 of input and output is the symbolic batch.

    Of encoder-decoders these are those of the decoder, with as many layers on either side.
    """
    entry, model = models.spec(name), models.build(name)

    inputs = {item.name: item.type.tensor_type.shape.dim for item in model.graph.input}
    data = inputs.get("decoder_input_ids", next(iter(inputs.values())))
    (logits,) = (item.type.tensor_type.shape.dim for item in model.graph.output)
    assert data[-1].dim_value == entry.sample_size
    assert data[0].dim_param == logits[0].dim_param == "batch"
    assert entry.global_batch > 0
    if entry.sample == "sequence":
        form = r"(?:encoder\.|decoder\.)?layers\.\d+\."
        blocks = {found.group() for node in model.graph.node if (found := re.match(form, node.name))}
        assert len(blocks) == entry.num_layers * (2 if "decoder_input_ids" in inputs else 1)


@pytest.mark.parametrize("name", TINY)
def test_shapes_are_inferred_strictly_for_every_value(name: str) -> None:
    """Strict inference with type checks finds rank and type of every value, at full size as well."""
    from onnx import shape_inference

    model = shape_inference.infer_shapes(models.build(name), check_type=True, strict_mode=True, data_prop=True)

    known = {item.name for item in (*model.graph.value_info, *model.graph.output)}
    assert known >= {output for node in model.graph.node for output in node.output}


@pytest.mark.parametrize("name", TINY)
def test_tiny_models_run_at_any_batch(name: str) -> None:
    """The same graph takes batches of 1 and 3, and samples do not influence each other."""
    model = models.build(name, **TINY[name])
    values = models.initial_values(model)
    data = feeds(model, 3)

    together = run(model, data, values)
    first = run(model, {key: array[:1] for key, array in data.items()}, values)

    expected = [dim.dim_value for dim in model.graph.output[0].type.tensor_type.shape.dim[1:]]
    assert together.shape == (3, *expected)
    assert np.isfinite(together).all()
    assert together.std() > 0
    np.testing.assert_allclose(together[:1], first, rtol=1e-4, atol=1e-5)  # float32, other order of summation in BLAS


@pytest.mark.parametrize("name", TINY)
def test_tiny_models_agree_with_onnxruntime(name: str) -> None:
    """A second implementation accepts the graphs as they are and computes the same numbers."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="the oracle of this test")
    model = models.build(name, **TINY[name])
    values, data = models.initial_values(model), feeds(model, 2)

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(with_weight_inputs(model).SerializeToString(), options)
    (actual,) = session.run(None, data | values)

    np.testing.assert_allclose(actual, run(model, data, values), rtol=1e-3, atol=1e-4)  # float32


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b"])
def test_decoders_do_not_look_ahead(name: str) -> None:
    """Changing the last token changes the last logits only."""
    model = models.build(name, **TINY[name])
    values, data = models.initial_values(model), feeds(model, 1)
    changed = {"input_ids": data["input_ids"].copy()}
    changed["input_ids"][0, -1] = (changed["input_ids"][0, -1] + 1) % 40

    before, after = run(model, data, values), run(model, changed, values)

    np.testing.assert_array_equal(before[:, :-1], after[:, :-1])
    assert not np.allclose(before[:, -1], after[:, -1])


def numpy_moe(
    x: NDArray[Any], values: dict[str, NDArray[Any]], config: MixtralConfig, *, over_all: bool = False
) -> NDArray[Any]:
    """Token by token: the best experts, first come first served, weighted by the softmax of their logits, or of all."""
    y = np.zeros_like(x)
    for b in range(x.shape[0]):
        load = np.zeros(config.experts, dtype=int)
        for s in range(x.shape[1]):
            token = x[b, s]
            logits = token @ values["moe.router.weight"]
            best = np.argsort(-logits)[: config.top_k]
            weights = np.exp(logits[best]) / np.exp(logits if over_all else logits[best]).sum()
            for expert, weight in zip(best, weights, strict=True):
                load[expert] += 1
                if load[expert] <= config.capacity:
                    gate = token @ values["moe.gate.weight"][expert]
                    gated = gate / (1 + np.exp(-gate)) * (token @ values["moe.up.weight"][expert])
                    y[b, s] += weight * (gated @ values["moe.down.weight"][expert])
    return y


@pytest.mark.parametrize(("factor", "capacity"), [(2.0, 12), (1.25, 8), (0.5, 3)])
def test_moe_equals_a_loop_over_tokens(factor: float, capacity: int) -> None:
    """12 tokens choose 2 of 4 experts: 12 places hold all, 8 are a third above the mean, 3 drop half or more."""
    config = MixtralConfig(1, 8, 2, 1, 10, 12, 40, experts=4, top_k=2, capacity_factor=factor)
    g = Builder("moe")
    moe(g, g.input("x", ("batch", 12, 8)), "moe", config)
    model = g.model({"moe": ("batch", 12, 8)})
    values = models.initial_values(model, seed=1)
    x = np.random.default_rng(2).normal(size=(3, 12, 8)).astype(np.float32)

    actual = run(model, {"x": x}, values)

    assert config.capacity == capacity
    np.testing.assert_allclose(actual, numpy_moe(x, values, config), rtol=1e-4, atol=1e-5)  # float32


def test_shared_experts_are_added_to_routed_ones() -> None:
    """8 tokens choose 2 of 4 experts by the softmax over all of them; two experts of 6 see every token."""
    config = DeepseekConfig(1, 8, 2, 2, 10, 6, 8, 40, experts=4, top_k=2)
    g = Builder("moe")
    experts(g, g.input("x", ("batch", 8, 8)), "moe", config)
    model = g.model({"moe.all": ("batch", 8, 8)})
    values = models.initial_values(model, seed=1)
    x = np.random.default_rng(2).normal(size=(2, 8, 8)).astype(np.float32)

    actual = run(model, {"x": x}, values)

    gate, up, down = (values[f"moe.shared.{part}.weight"] for part in ("gate", "up", "down"))
    assert gate.shape == (8, 12)
    shared = (x @ gate / (1 + np.exp(-(x @ gate))) * (x @ up)) @ down
    expected = numpy_moe(x, values, config.mixture, over_all=True) + shared
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)  # float32


def test_rotary_tables_start_at_angle_zero_and_turn_by_one_radian() -> None:
    """Position 0 is not rotated; the first pair turns by theta^0 = 1 radian per position."""
    values = models.initial_values(models.build("llama3-8b", **TINY["llama3-8b"]))

    np.testing.assert_array_equal(values["rope.cos"][0, 0], 1)
    np.testing.assert_allclose(values["rope.sin"][0, :, 0], np.sin(np.arange(6)), rtol=1e-6)


def test_buffers_are_not_parameters() -> None:
    """Each batch normalisation of ResNet-50 keeps a mean and a variance; the stem's have 64 elements."""
    from autopar.models.values import buffers

    untrained = buffers(models.build("resnet50"))

    assert len(untrained) == 2 * 53
    assert {"stem.norm.mean", "stem.norm.var"} <= untrained


@pytest.mark.parametrize("name", ["gpt3-175b", "megatron-1t", "llama3-405b", "mixtral-8x22b"])
def test_huge_models_are_small_files(name: str, tmp_path: Path) -> None:
    """No weight data is written, the bytes are the same every time, and the file reads back without the data file."""
    import onnx

    path = tmp_path / "model.onnx"

    models.save(models.build(name), path)

    assert path.stat().st_size < 1_000_000
    assert path.read_bytes() == models.build(name).SerializeToString(deterministic=True)
    loaded = onnx.load(path, load_external_data=False)
    assert models.num_parameters(loaded) == models.spec(name).num_parameters


@pytest.mark.parametrize("name", TINY)
def test_graphs_are_valid_and_without_loose_ends(name: str) -> None:
    """The checker accepts them, names are unique, and everything that is defined is used."""
    import onnx

    model = models.build(name)

    onnx.checker.check_model(with_weight_inputs(model), full_check=True)
    graph = model.graph
    defined = [item.name for item in (*graph.input, *graph.initializer)]
    used = {item.name for item in graph.output}
    for node in graph.node:
        used.update(filter(None, node.input))
        defined.extend(node.output)
    assert len(defined) == len(set(defined))
    assert {item for item in defined if not item.endswith(".ranked")} == used  # TopK has two outputs
    assert len({node.name for node in graph.node}) == len(graph.node)


def test_the_listing_needs_no_onnx() -> None:
    """Names and counts are known without loading the ONNX library, so that listing the zoo is instant."""
    code = "import sys; from autopar import models; models.spec('gpt2'); sys.exit('onnx' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], check=False)

    assert done.returncode == 0


def test_unknown_names_are_answered_with_the_nearest_ones() -> None:
    with pytest.raises(ModelError, match=r"the zoo has no model 'lama3-8b'\n  hint: did you mean llama3-8b"):
        models.spec("lama3-8b")


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("gpt2", {"layers": 2}, r"gpt2 has no hyperparameter 'layers'\n  hint: choose from num_layers, hidden"),
        ("gpt2", {"hidden": 100}, "hidden size 100 is not divisible by 12 heads\n  hint: give hidden=96"),
        ("gpt2", {"seq": 0}, "seq=0 of gpt2 is not positive"),
        ("gpt2", {"seq": "long"}, r"seq='long' of gpt2 is not of type int\n  hint: published: seq=1024"),
        ("resnet50", {"blocks": (3, 0)}, r"blocks=\(3, 0\) of resnet50 is not positive"),
        ("llama3-8b", {"kv_heads": 5}, "32 query heads are not divisible by 5 key-value heads"),
        ("mixtral-8x7b", {"top_k": 9}, "a token cannot choose 9 of 8 experts"),
        (
            "mixtral-8x7b",
            {"capacity_factor": 0.0},
            r"capacity_factor=0.0 of mixtral-8x7b is not positive\n  hint: published: capacity_factor=1.25",
        ),
        (
            "deepseek-moe-16b",
            {"dense_layers": -1},
            r"dense_layers=-1 of deepseek-moe-16b is below 0\n  hint: published: dense_layers=1",
        ),
        ("deepseek-moe-16b", {"dense_layers": 0.5}, "dense_layers=0.5 of deepseek-moe-16b is not of type int"),
        ("mixtral-8x7b", {"capacity_factor": float("inf")}, "capacity_factor=inf of mixtral-8x7b is not positive"),
        ("vit-b16", {"patch": 15}, "an image of 224 pixels cannot be cut into patches of 15"),
    ],
)
def test_impossible_overrides_are_refused(name: str, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        models.build(name, **overrides)


@pytest.mark.parametrize(("factor", "capacity"), [(1, 1024), (1.5, 1536)])
def test_fractions_may_be_given_as_whole_numbers(factor: float, capacity: int) -> None:
    """Of 4096 tokens that choose 2 of 8 experts each, an expert has places for 1024 times the factor."""
    graph = load(models.build("mixtral-8x7b", num_layers=1, capacity_factor=factor), batch=1)

    assert graph.values["layers.0.moe.slots"].shape == (1, 8, capacity)


def test_a_deepseek_model_may_have_no_dense_layer() -> None:
    """`dense_layers` is the one number of a configuration that may be 0."""
    model = models.build("deepseek-moe-16b", num_layers=2, dense_layers=0)

    products = {node.output[0] for node in model.graph.node}
    assert {"layers.0.moe.router", "layers.1.moe.router"} <= products
    assert not any(name.startswith("layers.0.mlp.") for name in products)


@pytest.mark.parametrize(
    ("base", "changed", "name"),
    [
        ("llama3-8b", {"seq": 4096}, "llama3-8b"),
        ("llama3-8b", {"num_layers": 4}, "llama3-8b-4-layers"),
        ("gpt3-175b", {"num_layers": 12, "hidden": 768, "heads": 12, "seq": 1024}, "gpt2"),
        ("gpt3-175b", {"num_layers": 2, "hidden": 64, "heads": 4}, "gpt-2-layers-hidden-64"),
        ("resnet50", {"channels": 32}, "resnet-changed"),
    ],
)
def test_a_graph_has_a_published_name_only_at_published_sizes(base: str, changed: dict[str, int], name: str) -> None:
    """The size of a sample does not make another model; a change of depth keeps the name of what was changed."""
    assert models.build(base, **changed).graph.name == name


@pytest.mark.parametrize("name", ["gpt2", "resnet50", "mixtral-8x7b"])
def test_a_graph_carries_its_configuration(name: str, tmp_path: Path) -> None:
    """Written to a file and read back, a model of the zoo states its sizes."""
    models.save(models.build(name), tmp_path / "model.onnx")

    found = models.sizes_of(onnx.load(tmp_path / "model.onnx", load_external_data=False))

    assert found == (models.spec(name).family, models.spec(name).config)


@pytest.mark.parametrize(
    "text", ["", "[1]", '{"family": "gpt"', '{"family": "none"}', '{"family": "gpt", "heads": "x"}']
)
def test_a_configuration_that_was_edited_is_refused(text: str) -> None:
    model = models.build("gpt2", num_layers=1)
    next(item for item in model.metadata_props if item.key == models.CONFIG_KEY).value = text

    with pytest.raises(ModelError, match=r"autopar\.config"):
        models.sizes_of(model)

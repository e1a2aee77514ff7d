"""Hugging Face configurations of decoders of images and text, built without PyTorch, held to transformers."""

import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from autopar import models
from autopar.errors import ModelError
from autopar.execute import run_graph
from autopar.models.decoder_config import TRANSPOSED, DecoderConfig
from autopar.models.image_text_config import ImageTextConfig
from autopar.models.image_text_reader import IMAGE_TEXT
from autopar.models.published_decoders import CONFIGURATIONS
from autopar.models.rotary import Grid
from autopar.models.values import grid_text, read_grid
from autopar.onnx import load
from autopar.training import training_step
from tests.gradients import as_float64, feeds_of, gradients
from tests.parity import Pairs, check_pairs
from tests.test_architectures import TINY as DECODERS
from tests.test_architectures import part_of_weight

Array = NDArray[Any]

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None,
    reason="needs torch and transformers",
)
TEXT, VOCAB = 7, 48
_IMAGE_TOKEN = 1
_QWEN_TEXT = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 40, "max_position_embeddings": 64,
}  # fmt: skip
_QWEN_TOWER = {
    "depth": 3, "num_heads": 2, "patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
}  # fmt: skip
_QWEN3_TOWER = {
    **_QWEN_TOWER, "hidden_size": 24, "intermediate_size": 36, "out_hidden_size": 32, "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 2],
}  # fmt: skip
_SECTIONS = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]}
_WIDER = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
_CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 40, "image_size": 12, "patch_size": 4,
}  # fmt: skip
_LLAVA = {
    "architectures": ["LlavaForConditionalGeneration"], "vision_config": _CLIP,
    "text_config": {**_QWEN_TEXT, "model_type": "qwen2"},
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "llava": _LLAVA,
    "llava, third layer": {**_LLAVA, "vision_feature_layer": 2, "multimodal_projector_bias": False},
    "gemma3": {
        "architectures": ["Gemma3ForConditionalGeneration"], "mm_tokens_per_image": 4,
        "text_config": {**DECODERS["gemma3_text"], "model_type": "gemma3_text"},
        "vision_config": {**_CLIP, "model_type": "siglip_vision_model", "image_size": 16, "vision_use_head": False},
    },
    "llama4": {
        "architectures": ["Llama4ForConditionalGeneration"],
        "text_config": {**DECODERS["llama4_text"], "model_type": "llama4_text"},
        "vision_config": {
            "model_type": "llama4_vision_model", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
            "intermediate_size": 96, "image_size": 16, "patch_size": 4, "projector_input_dim": 20,
            "projector_output_dim": 20, "vision_output_dim": 20, "rope_parameters": {"rope_theta": 100.0},
        },
    },
    "qwen2_vl": {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "text_config": {**_QWEN_TEXT, "rope_parameters": _SECTIONS, "rms_norm_eps": 1e-6},
        "vision_config": {**_QWEN_TOWER, "embed_dim": 24, "hidden_size": 32, "mlp_ratio": 2, "image_size": 8},
    },
    "qwen2_5_vl": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "text_config": {**_QWEN_TEXT, "rope_parameters": _SECTIONS, "rms_norm_eps": 1e-6},
        "vision_config": {
            **_QWEN_TOWER, "hidden_size": 24, "intermediate_size": 20, "out_hidden_size": 32, "image_size": 16,
            "window_size": 8, "fullatt_block_indexes": [1],
        },
    },
    "qwen3_vl": {
        "architectures": ["Qwen3VLForConditionalGeneration"], "tie_word_embeddings": True,
        "text_config": {**_QWEN_TEXT, "head_dim": 16, "rope_parameters": _WIDER},
        "vision_config": _QWEN3_TOWER,
    },
    "qwen3_vl_moe": {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "text_config": {
            **_QWEN_TEXT, "head_dim": 16, "rope_parameters": _WIDER, "moe_intermediate_size": 24, "num_experts": 6,
            "num_experts_per_tok": 2, "norm_topk_prob": True,
        },
        "vision_config": _QWEN3_TOWER,
    },
}  # fmt: skip
"""Small configurations, `model_type` first; `image_size` of Qwen2-VL and Qwen2.5-VL is a field of our own."""


def config_of(name: str) -> dict[str, Any]:
    """Return a small configuration."""
    return {"model_type": name.split(",")[0], **TINY[name]}


def built(config: dict[str, Any], text: int = TEXT) -> ImageTextConfig:
    """Return what is read of a configuration, for a text of so many tokens behind the image."""
    native = models.read_architecture(config, 1024)
    assert isinstance(native, ImageTextConfig), native
    native = models.read_architecture(config, native.patches + text)
    assert isinstance(native, ImageTextConfig)
    return native


def weight_of(tensors: Mapping[str, Array], name: str, decoder: DecoderConfig) -> Array:
    """Return what a weight of ours is in the tensors of a checkpoint, or of its gradients."""
    own = name.removesuffix(TRANSPOSED)
    if own in tensors:
        weight = tensors[own]
        weight = weight.reshape(len(weight), -1) if own.endswith("patch_embed.proj.weight") else weight
    else:
        whole, _, part = own.rpartition(".")
        fused = tensors[whole]
        weight = np.split(fused, 3)["qkv".index(part)] if "visual" in own else part_of_weight(fused, own, decoder)
    return np.swapaxes(weight, -1, -2) if name.endswith(TRANSPOSED) else weight


def against_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> Pairs:
    """Return logits, and gradients of their squared error by parameter, ours and those of transformers, in float64.

    There the text has placeholders where the patches of an image go; they come first, as ours do.
    """
    import torch
    import transformers

    config = config_of(name)
    native = built(config)
    grid = native.grid
    torch.manual_seed(0)
    known = transformers.AutoConfig.for_model(**{**config, "image_token_id": _IMAGE_TOKEN})
    known._experts_implementation = known.text_config._experts_implementation = "eager"
    kind = getattr(transformers, config["architectures"][0])
    module = kind._from_config(known, attn_implementation="eager").double().eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model = models.build_architecture("tiny", native)
    graph = as_float64(load(model, batch=2))
    step = training_step(graph, loss="mse", optimizer="sgd")
    weights = {key: tensor.detach().numpy() for key, tensor in module.state_dict().items()}
    trained = [value.name for value in step.parameters]
    tables = {key: value.astype(np.float64) for key, value in models.initial_values(model).items()}
    given = {**tables, **{key: weight_of(weights, key, native.decoder) for key in trained}}
    rng = np.random.default_rng(0)
    pixels = rng.normal(size=graph.values["pixel_values"].shape)
    tokens = rng.integers(2, VOCAB, graph.values["input_ids"].shape)
    inputs = {"pixel_values": pixels, "input_ids": tokens}
    targets = rng.normal(size=graph.values["logits"].shape)

    found = gradients(step, feeds_of(step, {**given, **inputs, "targets": targets}))
    result = run_graph(graph, {**given, **inputs})["logits"]

    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch, "float", torch.float64)
    known.image_token_id = _IMAGE_TOKEN
    places = np.full((2, native.patches), _IMAGE_TOKEN)
    kinds = torch.tensor([[1] * native.patches + [0] * TEXT] * 2)
    others: dict[str, Any] = {}
    if "qwen" in name:
        pixels = pixels.reshape(-1, pixels.shape[-1])
        others = {"image_grid_thw": torch.tensor([[1, *grid]] * 2), "mm_token_type_ids": kinds}
    # transformers 5.24 asks the outputs of Llama 4's decoder for a field that they lack.
    outputs = transformers.modeling_outputs.MoeCausalLMOutputWithPast
    monkeypatch.setattr(outputs, "image_outputs", None, raising=False)
    whole = torch.tensor(np.concatenate([places, tokens], axis=1))
    expected = module(input_ids=whole, pixel_values=torch.tensor(pixels), **others).logits
    torch.nn.functional.mse_loss(expected, torch.tensor(targets)).backward()
    theirs = {
        key: value.grad.numpy()
        for key, value in module.named_parameters(remove_duplicate=False)
        if value.grad is not None
    }
    used = [parameter for parameter in module.parameters() if parameter.grad is not None]
    assert models.num_parameters(model) == sum(parameter.numel() for parameter in used)
    assert set(found) == set(trained)
    pairs = {key: (found[key], weight_of(theirs, key, native.decoder)) for key in trained}
    return (result, expected.detach().numpy()), pairs


@needs_transformers
@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_models_are_those_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal trained parameters; with equal weights, equal logits and gradients."""
    check_pairs(*against_transformers(name, monkeypatch))


def test_every_family_has_a_small_configuration() -> None:
    """So that none is left out above."""
    assert {name.split(",")[0] for name in TINY} == set(IMAGE_TEXT)


_UNUSED = 4 * 1024**2 + 2 * 1024 * 4096 + 4096 + 11 * 1024
"""Parameters of CLIP's last layer and norm, whose results LLaVA does not use."""
_LLAMA4_TOWER = {
    "model_type": "llama4_vision_model", "hidden_size": 1408, "image_size": 336, "intermediate_size": 5632,
    "num_attention_heads": 16, "num_hidden_layers": 34, "patch_size": 14, "projector_input_dim": 4096,
    "projector_output_dim": 4096, "vision_output_dim": 4096, "rope_theta": 10000,
}  # fmt: skip
_GEMMA_TOWER = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
    "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "llava-hf/llava-1.5-7b-hf": (
        7_063_427_072 - _UNUSED,
        {
            "model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064},
            "vision_config": {"model_type": "clip_vision_model", "projection_dim": 768},
        },
    ),
    "google/gemma-3-27b-it": (
        27_432_406_640,
        {"model_type": "gemma3", "text_config": CONFIGURATIONS["gemma3-27b"], "vision_config": _GEMMA_TOWER},
    ),
    "meta-llama/Llama-4-Scout-17B-16E": (
        108_641_793_536,
        {"model_type": "llama4", "text_config": CONFIGURATIONS["llama4-scout"], "vision_config": _LLAMA4_TOWER},
    ),
    "meta-llama/Llama-4-Maverick-17B-128E": (
        401_583_781_376,
        {"model_type": "llama4", "text_config": CONFIGURATIONS["llama4-maverick"], "vision_config": _LLAMA4_TOWER},
    ),
    "Qwen/Qwen2-VL-7B-Instruct": (
        8_291_375_616,
        {
            "model_type": "qwen2_vl", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "max_position_embeddings": 32768, "max_window_layers": 28, "num_attention_heads": 28,
            "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "sliding_window": 32768,
            "use_sliding_window": False, "vocab_size": 152064,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "vision_config": {
                "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "hidden_size": 3584,
                "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2,
            },
        },
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct": (
        8_292_166_656,
        {
            "model_type": "qwen2_5_vl", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "max_position_embeddings": 128000, "max_window_layers": 28, "num_attention_heads": 28,
            "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "sliding_window": 32768,
            "use_sliding_window": False, "vocab_size": 152064,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "vision_config": {
                "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
                "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2,
                "spatial_patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
                "tokens_per_second": 2, "temporal_patch_size": 2,
            },
        },
    ),
    "Qwen/Qwen3-VL-8B-Instruct": (
        8_767_123_696,
        {
            "model_type": "qwen3_vl",
            "text_config": {
                "model_type": "qwen3_vl_text", "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288,
                "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rope_theta": 5000000,
                "vocab_size": 151936, "max_position_embeddings": 262144,
                "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            },
            "vision_config": {
                "model_type": "qwen3_vl", "deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_size": 1152,
                "intermediate_size": 4304, "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 4096,
                "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
            },
        },
    ),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": (
        31_070_754_032,
        {
            "model_type": "qwen3_vl_moe",
            "text_config": {
                "model_type": "qwen3_vl_moe_text", "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144,
                "moe_intermediate_size": 768, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
                "num_hidden_layers": 48, "num_key_value_heads": 4, "rope_theta": 5000000, "vocab_size": 151936,
                "max_position_embeddings": 262144,
                "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            },
            "vision_config": {
                "model_type": "qwen3_vl_moe", "deepstack_visual_indexes": [8, 16, 24], "depth": 27,
                "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "num_position_embeddings": 2304,
                "out_hidden_size": 2048, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
            },
        },
    ),
}  # fmt: skip
"""Parameters of published checkpoints, a tied embedding counted once, and the sizes in their configurations."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_have_the_published_parameters(name: str) -> None:
    """Without PyTorch."""
    count, config = PUBLISHED[name]

    native = models.read_architecture(config, 2048)

    assert not isinstance(native, models.Unbuilt), native
    assert models.num_parameters(models.build_architecture("published", native)) == count


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("llava", {"vision_feature_layer": [1, 2]}, "vision_feature_layer=[1, 2]"),
        ("llava", {"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy='full'"),
        ("llava", {"vision_config": {"model_type": "pixtral"}}, "vision_config with model_type='pixtral'"),
        ("llava", {"text_config": {"model_type": "rwkv"}}, "text_config with model_type='rwkv'"),
        ("llava", {"text_config": {"model_type": "t5"}}, "text_config with model_type='t5', which is no decoder"),
        ("gemma3", {"mm_tokens_per_image": 9}, "mm_tokens_per_image=9 of 4 x 4 patches"),
        ("gemma3", {"architectures": ["Gemma3Model"]}, "gemma3 is built as Gemma3ForConditionalGeneration"),
        (
            "llama4",
            {"vision_config": {**TINY["llama4"]["vision_config"], "pixel_shuffle_ratio": 0.25}},
            "vision_config with pixel_shuffle_ratio=0.25",
        ),
        (
            "qwen2_vl",
            {"vision_config": {**TINY["qwen2_vl"]["vision_config"], "hidden_size": 40}},
            "a hidden_size unlike that of the decoder",
        ),
        (
            "qwen2_5_vl",
            {"vision_config": {**TINY["qwen2_5_vl"]["vision_config"], "image_size": 12}},
            "an image of 6 x 6 patches, whose windows of 4 x 4 are not alike",
        ),
        (
            "qwen2_5_vl",
            {"vision_config": {**TINY["qwen2_5_vl"]["vision_config"], "window_size": 3}},
            "window_size=3 below the 4 pixels of a token",
        ),
        ("qwen2_vl", {"rope_scaling": {"type": "mrope", "mrope_section": 3}, "text_config": {}}, "mrope_section=3"),
        (
            "qwen3_vl",
            {"vision_config": {**_QWEN3_TOWER, "image_size": 16}},
            "an image of 8 x 8 patches, for which a table of 16 positions is interpolated",
        ),
    ],
)
def test_what_a_builder_does_not_know_is_said(name: str, change: dict[str, Any], reason: str) -> None:
    """Nothing that changes the model is dropped silently."""
    native = models.read_architecture({**config_of(name), **change}, 1024)

    assert isinstance(native, models.Unbuilt)
    assert reason in native.reason


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llava", {"vision_config": {"image_size": 56}}, "no room for text behind the 16 of an image"),
        ("qwen2_vl", {"vision_config": {**_QWEN_TOWER, "embed_dim": 24, "hidden_size": 32}}, "no room for text"),
        (
            "qwen2_vl",
            {"vision_config": {**TINY["qwen2_vl"]["vision_config"], "image_size": 6}},
            "3 x 3 patches of an image are not squares of 2 x 2",
        ),
        (
            "qwen3_vl",
            {"vision_config": {**_QWEN3_TOWER, "deepstack_visual_indexes": [5]}},
            "have no layers for 1 taps",
        ),
        (
            "qwen3_vl",
            {"vision_config": {**_QWEN3_TOWER, "deepstack_visual_indexes": 5}},
            "deepstack_visual_indexes of the configuration is 5, not a list of layers",
        ),
        (
            "qwen2_5_vl",
            {"vision_config": {**TINY["qwen2_5_vl"]["vision_config"], "fullatt_block_indexes": 1}},
            "fullatt_block_indexes of the configuration is 1, not a list of layers",
        ),
        (
            "llama4",
            {"vision_config": {**TINY["llama4"]["vision_config"], "num_attention_heads": 5}},
            "hidden_size 24 of vision_config is not a multiple of 4 for each of its 5 heads",
        ),
    ],
)
def test_an_impossible_configuration_gets_one_error(name: str, change: dict[str, Any], message: str) -> None:
    """It names the field."""
    with pytest.raises(ModelError, match=message):
        models.read_architecture({**config_of(name), **change}, 12)


def test_places_of_patches_go_square_by_square() -> None:
    """Of 2 x 4 patches in squares of 2 x 2, rows from 1 on; two tokens of text follow behind the farthest column."""
    grid = Grid(2, 4, (0, 1, 2, 1), block=2, first=1, then_text=True)

    places = grid.positions(10)

    assert places[:, 0].tolist() == [0] * 8 + [4, 5]
    assert places[:, 1].tolist() == [1, 1, 2, 2, 1, 1, 2, 2, 4, 5]
    assert places[:, 2].tolist() == [1, 2, 1, 2, 3, 4, 3, 4, 4, 5]
    assert places[:, 3].tolist() == places[:, 1].tolist()
    assert read_grid(grid_text(grid)) == grid


def test_places_of_windows_go_window_by_window() -> None:
    """Of 4 x 4 patches in windows of 2 x 2, of squares of one patch."""
    grid = Grid(4, 4, (1, 2), window=2)

    rows, columns = grid.positions(16).T.tolist()

    assert rows == [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3]
    assert columns == [0, 1, 0, 1, 2, 3, 2, 3, 0, 1, 0, 1, 2, 3, 2, 3]
    assert read_grid(grid_text(grid)) == grid


def test_places_of_videos_go_frame_by_frame() -> None:
    """Behind one token of text, two frames of 1 x 2 patches."""
    grid = Grid(1, 2, (0, 1, 2), skipped=1, frames=2)

    assert grid.positions(5).T.tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [0, 0, 1, 0, 1]]
    assert read_grid(grid_text(grid)) == grid

"""Hugging Face configurations of models that are no plain decoder, built without PyTorch, held to transformers."""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from autopar import models
from autopar.errors import ModelError
from autopar.execute import run_graph
from autopar.models.architectures import BUILDERS
from autopar.models.decoder_config import TRANSPOSED, DecoderConfig
from autopar.models.dit import DitConfig
from autopar.models.dual_encoder_reader import DUAL_ENCODERS
from autopar.models.encoder_decoder_config import RelativePositions
from autopar.models.encoder_decoder_reader import ENCODER_DECODERS
from autopar.models.encoder_reader import ENCODERS
from autopar.models.flux import FluxConfig
from autopar.models.image_text_config import ImageTextConfig
from autopar.models.sd3 import Sd3Config
from autopar.models.wan import WanConfig
from autopar.onnx import load
from autopar.training import training_step
from autopar.workload import open_workload
from tests.gradients import as_float64, feeds_of, gradients
from tests.parity import Pairs, check_pairs

Array = NDArray[Any]

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None,
    reason="needs torch and transformers",
)
SEQ, VOCAB, LAYERS = 12, 48, 2
_BLOCKS = {"hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 40}
_BERT = {**_BLOCKS, "vocab_size": VOCAB, "max_position_embeddings": 20}
_IMAGE = {**_BLOCKS, "image_size": 12, "patch_size": 4}
_T5 = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 6, "d_ff": 40, "num_layers": LAYERS, "num_heads": 4}
_WHISPER = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": LAYERS, "decoder_layers": LAYERS,
    "encoder_attention_heads": 4, "decoder_attention_heads": 8, "encoder_ffn_dim": 40, "decoder_ffn_dim": 36,
    "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 20, "pad_token_id": 0, "bos_token_id": 0,
    "eos_token_id": 0, "decoder_start_token_id": 0,
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "bert": {**_BERT, "architectures": ["BertForMaskedLM"]},
    "bert, all positions": {**_BERT, "hidden_act": "relu", "max_position_embeddings": SEQ},
    "roberta": {**_BERT, "architectures": ["RobertaForMaskedLM"], "type_vocab_size": 1},
    "xlm-roberta": {**_BERT, "architectures": ["XLMRobertaForMaskedLM"], "type_vocab_size": 1},
    "vit": {**_IMAGE, "architectures": ["ViTForImageClassification"], "id2label": {"0": "a", "1": "b", "2": "c"}},
    "vit, oblong": {**_IMAGE, "image_size": [8, 12], "patch_size": [5, 2], "qkv_bias": False},
    "clip_vision_model": {**_IMAGE, "architectures": ["CLIPVisionModel"]},
    "clip_vision_model, projected": {
        **_IMAGE, "architectures": ["CLIPVisionModelWithProjection"], "projection_dim": 24
    },
    "siglip_vision_model": {**_IMAGE, "architectures": ["SiglipVisionModel"]},
    "siglip_vision_model, features": {**_IMAGE, "vision_use_head": False},
    "t5": {**_T5, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 7},
    "t5, gated": {**_T5, "feed_forward_proj": "gated-gelu", "num_decoder_layers": 3},
    "whisper": {**_WHISPER, "architectures": ["WhisperForConditionalGeneration"]},
    "clip": {
        "text_config": {**_BLOCKS, "vocab_size": VOCAB, "max_position_embeddings": 20, "eos_token_id": VOCAB - 1},
        "vision_config": {**_IMAGE, "hidden_size": 24}, "projection_dim": 20,
    },
    "siglip": {
        "text_config": {
            **_BLOCKS, "vocab_size": VOCAB, "max_position_embeddings": SEQ, "projection_size": 24, "hidden_act": "relu",
        },
        "vision_config": {**_IMAGE, "hidden_size": 24},
    },
    "whisper, all positions": {**_WHISPER, "max_target_positions": SEQ, "activation_function": "relu"},
}  # fmt: skip
"""Small configurations, `model_type` first."""

DEFAULT_CLASS = {
    "bert": "BertForMaskedLM",
    "clip": "CLIPModel",
    "siglip": "SiglipModel",
    "vit": "ViTForImageClassification",
    "siglip_vision_model": "SiglipVisionModel",
    "t5": "T5ForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration",
}
"""Class of transformers where a configuration names none."""


def config_of(name: str) -> dict[str, Any]:
    """Return a small configuration."""
    return {"model_type": name.split(",")[0], **TINY[name]}


def weight_of(tensors: Mapping[str, Array], name: str) -> Array:
    """Return what a weight of ours is in the tensors of a checkpoint, or of its gradients."""
    own = name.removesuffix(TRANSPOSED)
    if own in tensors:
        weight = tensors[own]
    else:  # queries, keys and values in one matrix
        whole, _, part = own.rpartition(".")
        weight = np.split(tensors[whole], 3)["qkv".index(part)]
    return weight.T if name.endswith(TRANSPOSED) else weight


def against_transformers(name: str) -> Pairs:
    """Return results, and gradients of their squared error by parameter, ours and those of transformers, in float64."""
    import torch
    import transformers

    config = config_of(name)
    torch.manual_seed(0)
    known = transformers.AutoConfig.for_model(**config)
    kind = getattr(transformers, config.get("architectures", [DEFAULT_CLASS.get(known.model_type)])[0])
    module = kind._from_config(known, attn_implementation="eager").double().eval()
    for parameter in module.parameters():
        if parameter.requires_grad:  # the others are tables that we make, too
            torch.nn.init.normal_(parameter, std=0.3)
    native = models.read_architecture(config, SEQ)
    assert not isinstance(native, models.Unbuilt)
    model = models.build_architecture("tiny", native)

    graph = as_float64(load(model, batch=2))
    output = graph.outputs[0]
    step = training_step(graph, loss="mse", optimizer="sgd")
    weights = {key: tensor.detach().numpy() for key, tensor in module.state_dict().items()}
    trained = [value.name for value in step.parameters]
    tables = {key: value.astype(np.float64) for key, value in models.initial_values(model).items()}
    given = {**tables, **{key: weight_of(weights, key) for key in trained}}
    rng = np.random.default_rng(0)
    inputs: dict[str, Array] = {
        key: rng.normal(size=graph.values[key].shape)
        if graph.values[key].is_float
        else rng.integers(2, VOCAB - 1, graph.values[key].shape)  # tokens from 2 on are no padding in any family
        for key in graph.inputs
    }
    if "input_ids" in inputs:
        inputs["input_ids"][:, -1] = VOCAB - 1  # CLIP reads the result of the token with the largest number
    targets = rng.normal(size=graph.values[output].shape)
    found = gradients(step, feeds_of(step, {**given, **inputs, "targets": targets}))
    result = run_graph(graph, {**given, **inputs})[output]

    expected = module(**{key: torch.tensor(value) for key, value in inputs.items()})[output]
    torch.nn.functional.mse_loss(expected, torch.tensor(targets)).backward()
    theirs = {
        key: value.grad.numpy()
        for key, value in module.named_parameters(remove_duplicate=False)
        if value.grad is not None
    }
    used = [parameter for parameter in module.parameters() if parameter.grad is not None]
    assert models.num_parameters(model) == sum(parameter.numel() for parameter in used)
    assert set(found) == set(trained)
    pairs = {key: (found[key], weight_of(theirs, key)) for key in trained}
    return (result, expected.detach().numpy()), pairs


@needs_transformers
@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_models_are_those_of_transformers(name: str) -> None:
    """Equal trained parameters; with equal weights, equal results and gradients."""
    check_pairs(*against_transformers(name))


def test_every_family_but_decoders_has_a_small_configuration() -> None:
    """So that none is left out above."""
    built = {name.split(",")[0]: models.read_architecture(config_of(name), SEQ) for name in TINY}

    assert set(built) == {*ENCODERS, *ENCODER_DECODERS, *DUAL_ENCODERS}
    assert {type(native) for native in built.values()} == set(BUILDERS) - {
        DecoderConfig,
        ImageTextConfig,
        DitConfig,
        FluxConfig,
        Sd3Config,
        WanConfig,
    }


PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "google-bert/bert-base-uncased": (109_514_298, {"model_type": "bert", "architectures": ["BertForMaskedLM"]}),
    "google-bert/bert-large-uncased": (
        335_174_458,
        {
            "model_type": "bert", "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16,
            "num_hidden_layers": 24,
        },
    ),
    "FacebookAI/roberta-base": (
        124_697_433,
        {"model_type": "roberta", "max_position_embeddings": 514, "type_vocab_size": 1, "vocab_size": 50265},
    ),
    "FacebookAI/xlm-roberta-large": (
        560_142_482,
        {
            "model_type": "xlm-roberta", "hidden_size": 1024, "intermediate_size": 4096, "max_position_embeddings": 514,
            "num_attention_heads": 16, "num_hidden_layers": 24, "type_vocab_size": 1, "vocab_size": 250002,
        },
    ),
    "google/vit-base-patch16-224": (
        86_567_656,
        {"model_type": "vit", "id2label": {str(index): str(index) for index in range(1000)}},
    ),
    "openai/clip-vit-large-patch14": (
        303_966_208,
        {
            "model_type": "clip_vision_model", "architectures": ["CLIPVisionModelWithProjection"], "hidden_size": 1024,
            "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14,
            "projection_dim": 768,
        },
    ),
    "openai/clip-vit-large-patch14, both towers": (
        427_616_513,
        {
            "model_type": "clip", "projection_dim": 768,
            "text_config": {
                "hidden_size": 768, "intermediate_size": 3072,
                "num_attention_heads": 12, "num_hidden_layers": 12,
            },
            "vision_config": {
                "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24,
                "patch_size": 14,
            },
        },
    ),
    "google/siglip-so400m-patch14-384, both towers": (
        877_960_498,
        {
            "model_type": "siglip",
            "text_config": {
                "hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27,
            },
            "vision_config": {
                "hidden_size": 1152, "image_size": 384, "intermediate_size": 4304, "num_attention_heads": 16,
                "num_hidden_layers": 27, "patch_size": 14,
            },
        },
    ),
    "google-t5/t5-small": (60_506_624, {"model_type": "t5", "tie_word_embeddings": True}),
    "google/flan-t5-small": (
        76_961_152,
        {
            "model_type": "t5", "d_ff": 1024, "num_heads": 6, "num_layers": 8, "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
        },
    ),
    "openai/whisper-tiny": (37_760_640 - 1500 * 384, {"model_type": "whisper"}),  # without fixed positions
    "google/siglip-so400m-patch14-384": (
        428_225_600,
        {
            "model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 384, "intermediate_size": 4304,
            "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14,
        },
    ),
}  # fmt: skip
"""Parameters of published checkpoints, a tied embedding counted once, and the sizes in their configurations."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_have_the_published_parameters(name: str) -> None:
    """Without PyTorch."""
    count, config = PUBLISHED[name]

    native = models.read_architecture(config, 64)

    assert not isinstance(native, models.Unbuilt)
    assert models.num_parameters(models.build_architecture("published", native)) == count


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("bert", {"architectures": ["BertForPreTraining"]}, "bert is built as BertForMaskedLM"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        ("bert", {"is_decoder": True}, "is_decoder=True"),
        ("bert", {"add_cross_attention": True}, "add_cross_attention=True"),
        ("bert", {"hidden_act": "mish"}, "hidden_act='mish'"),
        ("roberta", {"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ("vit", {"architectures": ["ViTModel"]}, "vit is built as ViTForImageClassification"),
        ("clip_vision_model", {"architectures": ["CLIPModel"]}, "CLIPVisionModel or CLIPVisionModelWithProjection"),
        ("clip", {"architectures": ["CLIPTextModel"]}, "clip is built as CLIPModel"),
        ("clip", {"vision_config": {"model_type": "dinov2"}}, "vision_config with model_type='dinov2'"),
        ("clip", {"text_config": {"attention_bias": True}}, "text_config with attention_bias=True"),
        ("siglip", {"vision_config": {"vision_use_head": False}}, "vision_config with vision_use_head=False"),
        ("t5", {"architectures": ["T5EncoderModel"]}, "t5 is built as T5ForConditionalGeneration"),
        ("t5", {"feed_forward_proj": "gated-mish"}, "feed_forward_proj='mish'"),
        ("whisper", {"scale_embedding": True}, "scale_embedding=True"),
    ],
)
def test_what_a_builder_does_not_know_is_said(name: str, change: dict[str, Any], reason: str) -> None:
    """Nothing that changes the model is dropped silently."""
    native = models.read_architecture({**config_of(name), **change}, SEQ)

    assert isinstance(native, models.Unbuilt)
    assert reason in native.reason


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("bert", {"max_position_embeddings": 8}, "learned positions for 8 tokens, fewer than the 12"),
        ("roberta", {"max_position_embeddings": 13}, "learned positions for 11 tokens, fewer than the 12"),
        ("roberta", {"pad_token_id": "none"}, "pad_token_id of the configuration is 'none'"),
        ("t5", {"relative_attention_max_distance": 4}, "8 buckets do not cover distances up to 4"),
        ("whisper", {"max_target_positions": 8}, "positions for 8 tokens, fewer than the 12"),
        ("whisper", {"d_model": 30}, "d_model 30 of the configuration is not divisible by its 4 heads"),
        ("clip", {"text_config": {"max_position_embeddings": 8}}, "learned positions for 8 tokens, fewer than the 12"),
        ("siglip", {"text_config": {"hidden_size": 48}}, "images become vectors of 24 elements and texts of 48, which"),
        ("vit", {"patch_size": 13}, "12 x 12 pixels holds no patch of 13 x 13"),
        ("vit", {"image_size": [8]}, r"image_size of the configuration is \[8\]"),
    ],
)
def test_an_impossible_configuration_gets_one_error(name: str, change: dict[str, Any], message: str) -> None:
    """It names the field."""
    with pytest.raises(ModelError, match=message):
        models.read_architecture({**config_of(name), **change}, SEQ)


def test_tokens_per_sequence_cannot_be_set_where_there_are_none(tmp_path: Path) -> None:
    """A setting without effect is an error."""
    (tmp_path / "config.json").write_text(json.dumps(config_of("vit")))

    assert open_workload(f"hf:{tmp_path}").forward(4).values["pixel_values"].shape == (4, 3, 12, 12)
    with pytest.raises(ModelError, match="seq=8 cannot be set on vit, which takes images"):
        open_workload(f"hf:{tmp_path}", dims={"seq": 8})


@needs_transformers
def test_distances_are_in_the_buckets_of_transformers() -> None:
    """As published: 32 buckets, of distances up to 128 apart, and one more on either side."""
    import torch
    from transformers.models.t5.modeling_t5 import T5Attention

    for both_ways in (False, True):
        found = RelativePositions("", 32, 128, both_ways).bucket_of_distance()

        expected = T5Attention._relative_position_bucket(torch.arange(-129, 130), bidirectional=both_ways).tolist()
        assert list(found) == expected[1:-1]
        assert (expected[0], expected[-1]) == (found[0], found[-1])  # those farther away share the last bucket

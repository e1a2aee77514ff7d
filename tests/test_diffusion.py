"""Diffusion transformers of the zoo, held to diffusers."""

import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from autopar import models
from autopar.errors import ModelError
from autopar.execute import run_graph
from autopar.models.decoder_config import TRANSPOSED
from autopar.models.diffusion_reader import DIFFUSION
from autopar.models.dit import DitConfig
from autopar.models.flux import FluxConfig
from autopar.models.sd3 import Sd3Config
from autopar.models.wan import WanConfig
from autopar.onnx import load
from autopar.training import training_step
from autopar.workload import open_workload
from tests.gradients import as_float64, feeds_of, gradients
from tests.parity import Pairs, check_pairs

Array = NDArray[Any]

needs_diffusers = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None or importlib.util.find_spec("diffusers") is None,
    reason="needs torch and diffusers",
)
FLUX = FluxConfig(
    num_layers=2, single_layers=2, hidden=32, heads=2, axes=(4, 4, 8), latent=3, image_size=6, tokens=5, context=12,
    pooled=7,
)  # fmt: skip
WAN = WanConfig(
    num_layers=2, hidden=32, heads=2, ffn=40, latent=3, frames=2, height=4, width=6, tokens=5, context=12
)  # fmt: skip

DIT = DitConfig(num_layers=2, hidden=32, heads=2, image_size=6, latent=3, outputs=6, classes=7)
SD3 = Sd3Config(
    num_layers=3, hidden=32, heads=2, latent=3, image_size=6, base_size=8, places=5, tokens=5, context=12, pooled=7
)  # fmt: skip


def weight_of(tensors: Mapping[str, Array], name: str, hidden: int) -> Array:
    """Return what a weight of ours is in the tensors of a checkpoint, or of its gradients."""
    own = name.removesuffix(TRANSPOSED)
    if own in tensors:
        weight = tensors[own]
        weight = weight.reshape(len(weight), -1) if weight.ndim > 3 else weight  # a kernel of patches
    else:
        whole, _, part = own.rpartition(".")
        weight = tensors[whole]
        if part == "attn":
            weight = weight[:, :hidden]
        elif part == "mlp":
            weight = weight[:, hidden:] if weight.ndim == 2 else weight
        elif "table" in whole:
            weight = weight[:, int(part) : int(part) + 1]
        else:
            weight = np.split(weight, len(weight) // hidden)[int(part)]
    return weight.T if name.endswith(TRANSPOSED) else weight


def compared(module: Any, family: str, config: Any, inputs: dict[str, Array], run: Any) -> Pairs:
    """Return results, and gradients of the squared error by parameter, in float64; `run` calls the module."""
    import torch

    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model = models.build_config(family, config)
    assert models.num_parameters(model) == sum(parameter.numel() for parameter in module.parameters())
    (output,) = (item.name for item in model.graph.output)
    graph = as_float64(load(model, batch=2))
    step = training_step(graph, loss="auto", optimizer="sgd")
    weights = {key: tensor.detach().numpy() for key, tensor in module.state_dict().items()}
    trained = [value.name for value in step.parameters]
    tables = {key: value.astype(np.float64) for key, value in models.initial_values(model).items()}
    given = {**tables, **{key: weight_of(weights, key, config.hidden) for key in trained}}
    targets = np.random.default_rng(1).normal(size=graph.values[output].shape)

    found = gradients(step, feeds_of(step, {**given, **inputs, "targets": targets}))
    result = run_graph(graph, {**given, **inputs})[output]

    expected = run(module)
    torch.nn.functional.mse_loss(expected, torch.tensor(targets)).backward()
    theirs = {key: value.grad.numpy() for key, value in module.named_parameters() if value.grad is not None}
    assert set(found) == set(trained)
    pairs = {key: (found[key], weight_of(theirs, key, config.hidden)) for key in trained}
    return (result, expected.detach().numpy()), pairs


def flux(monkeypatch: pytest.MonkeyPatch, guidance: bool) -> Pairs:
    """Patches of 2 x 2 pixels are packed and unpacked by the pipeline there."""
    import torch
    from diffusers import FluxTransformer2DModel

    module = FluxTransformer2DModel(
        in_channels=12, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=12, pooled_projection_dim=7, guidance_embeds=guidance, axes_dims_rope=(4, 4, 8),
    ).double()  # fmt: skip
    rng = np.random.default_rng(0)
    images, text = rng.normal(size=(2, 3, 6, 6)), rng.normal(size=(2, 5, 12))
    inputs: dict[str, Array] = {
        "images": images, "text": text, "pooled": rng.normal(size=(2, 7)), "step": np.array([3, 700]),
    }  # fmt: skip
    if guidance:
        inputs["guidance"] = np.array([3500, 1000])
    config = FluxConfig(**{**{name: getattr(FLUX, name) for name in FLUX.__slots__}, "guidance": guidance})

    def run(module: Any) -> Any:
        monkeypatch.setattr(torch, "float32", torch.float64)
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
        packed = torch.tensor(images).reshape(2, 3, 3, 2, 3, 2).permute(0, 2, 4, 1, 3, 5).reshape(2, 9, 12)
        rows, columns = torch.meshgrid(torch.arange(3.0), torch.arange(3.0), indexing="ij")
        places = torch.stack([0 * rows, rows, columns], dim=-1).reshape(9, 3)
        given = {key: torch.tensor(inputs[key] / 1000) for key in ("step", "guidance") if key in inputs}
        flow = module(
            hidden_states=packed, encoder_hidden_states=torch.tensor(text),
            pooled_projections=torch.tensor(inputs["pooled"]), timestep=given["step"],
            guidance=given.get("guidance"), img_ids=places, txt_ids=torch.zeros(5, 3),
        ).sample  # fmt: skip
        return flow.reshape(2, 3, 3, 3, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(2, 3, 6, 6)

    return compared(module, "flux", config, inputs, run)


def wan(monkeypatch: pytest.MonkeyPatch) -> Pairs:
    """What it computes in float32 whatever the weights are (norms) is computed in float64, too."""
    import torch
    from diffusers import WanTransformer3DModel

    module = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=3, out_channels=3, text_dim=12, ffn_dim=40,
        num_layers=2, rope_max_seq_len=8,
    ).double()  # fmt: skip
    rng = np.random.default_rng(0)
    inputs: dict[str, Array] = {
        "video": rng.normal(size=(2, 3, 2, 4, 6)), "text": rng.normal(size=(2, 5, 12)), "step": np.array([3, 700]),
    }  # fmt: skip

    def run(module: Any) -> Any:
        monkeypatch.setattr(torch, "float32", torch.float64)
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
        return module(
            hidden_states=torch.tensor(inputs["video"]), timestep=torch.tensor(inputs["step"]),
            encoder_hidden_states=torch.tensor(inputs["text"]),
        ).sample  # fmt: skip

    return compared(module, "wan", WAN, inputs, run)


def stable_diffusion_3(monkeypatch: pytest.MonkeyPatch, dual: int, normed: bool) -> Pairs:
    """Version 3 and 3.5; an image of fewer patches than there are places has those in the middle."""
    import torch
    from diffusers import SD3Transformer2DModel

    module = SD3Transformer2DModel(
        sample_size=8, in_channels=3, out_channels=3, num_layers=3, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=12, caption_projection_dim=32, pooled_projection_dim=7, pos_embed_max_size=5,
        dual_attention_layers=tuple(range(dual)), qk_norm="rms_norm" if normed else None,
    ).double()  # fmt: skip
    rng = np.random.default_rng(0)
    inputs: dict[str, Array] = {
        "images": rng.normal(size=(2, 3, 6, 6)), "text": rng.normal(size=(2, 5, 12)), "pooled": rng.normal(size=(2, 7)),
        "step": np.array([3, 700]),
    }  # fmt: skip

    def run(module: Any) -> Any:
        monkeypatch.setattr(torch, "float32", torch.float64)
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
        return module(
            hidden_states=torch.tensor(inputs["images"]), encoder_hidden_states=torch.tensor(inputs["text"]),
            pooled_projections=torch.tensor(inputs["pooled"]), timestep=torch.tensor(inputs["step"]),
        ).sample  # fmt: skip

    return compared(module, "sd3", replace(SD3, dual=dual, qk_norm=normed), inputs, run)


def dit(monkeypatch: pytest.MonkeyPatch, shared: bool) -> Pairs:
    """As published, where all blocks embed step and class by the same weights, and with weights of their own."""
    import torch
    from diffusers import DiTTransformer2DModel

    module = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=3, out_channels=6, num_layers=2, sample_size=6,
        num_embeds_ada_norm=7,
    ).double().eval()  # fmt: skip
    if shared:
        module.transformer_blocks[1].norm1.emb = module.transformer_blocks[0].norm1.emb
    rng = np.random.default_rng(0)
    inputs: dict[str, Array] = {
        "images": rng.normal(size=(2, 3, 6, 6)), "step": np.array([3, 700]), "label": np.array([2, 7])
    }  # fmt: skip

    def run(module: Any) -> Any:
        monkeypatch.setattr(torch, "float32", torch.float64)
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
        given = {key: torch.tensor(inputs[key]) for key in ("images", "step", "label")}
        return module(given["images"], timestep=given["step"], class_labels=given["label"]).sample

    return compared(module, "dit", replace(DIT, shared=shared), inputs, run)


DIFFUSERS: Mapping[str, Callable[[pytest.MonkeyPatch], Pairs]] = {
    "FluxTransformer2DModel": lambda patch: flux(patch, True),
    "FluxTransformer2DModel, no guidance": lambda patch: flux(patch, False),
    "WanTransformer3DModel": wan,
    "SD3Transformer2DModel": lambda patch: stable_diffusion_3(patch, 0, False),
    "SD3Transformer2DModel, 3.5": lambda patch: stable_diffusion_3(patch, 2, True),
    "DiTTransformer2DModel": lambda patch: dit(patch, False),
    "DiTTransformer2DModel, shared": lambda patch: dit(patch, True),
}
"""Small models beside those of diffusers, `model_type` first."""


@needs_diffusers
@pytest.mark.slow
@pytest.mark.parametrize("name", DIFFUSERS)
def test_models_are_those_of_diffusers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal parameters; with equal weights, equal results and gradients."""
    check_pairs(*DIFFUSERS[name](monkeypatch))


def test_every_diffusion_transformer_has_a_small_model() -> None:
    """So that none is left out above."""
    assert {name.split(",")[0] for name in DIFFUSERS} == set(DIFFUSION)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("flux-12b", {"axes": (16, 56, 54)}, r"axes \(16, 56, 54\) do not make a head of 128 elements"),
        ("flux-12b", {"image_size": 5}, "5 latent pixels do not divide into patches of 2"),
        ("sd3-medium", {"image_size": 400}, "200 patches a side has more than the model's 192 places"),
        ("sd3-medium", {"dual": 25}, "25 of 24 blocks cannot attend twice"),
        ("dit-xl-2", {"image_size": 31}, "31 latent pixels do not divide into patches of 2"),
        ("dit-xl-2", {"hidden": 1150, "heads": 2}, "no sines and cosines in a width of 1150"),
        ("wan-14b", {"heads": 1280}, "cannot turn a head of 4 elements"),
        ("wan-14b", {"width": 105}, "60 x 105 latent pixels do not divide into patches of 2 x 2"),
    ],
)
def test_impossible_sizes_are_refused(name: str, overrides: dict[str, Any], message: str) -> None:
    """The message has the numbers."""
    with pytest.raises(ModelError, match=message):
        models.build(name, **overrides)


def test_a_video_is_as_many_patches_as_published() -> None:
    """81 frames of 832 x 480 pixels are 32,760 tokens."""
    native = models.spec("wan-14b").config
    assert isinstance(native, WanConfig)

    assert native.seq == 32_760


_FLUX_DEV = {
    "_class_name": "FluxTransformer2DModel", "_diffusers_version": "0.30.0", "attention_head_dim": 128,
    "guidance_embeds": True, "in_channels": 64, "joint_attention_dim": 4096, "num_attention_heads": 24,
    "num_layers": 19, "num_single_layers": 38, "patch_size": 1, "pooled_projection_dim": 768,
}  # fmt: skip
_WAN = {
    "_class_name": "WanTransformer3DModel", "added_kv_proj_dim": None, "attention_head_dim": 128,
    "cross_attn_norm": True, "eps": 1e-06, "ffn_dim": 13824, "freq_dim": 256, "image_dim": None, "in_channels": 16,
    "num_attention_heads": 40, "num_layers": 40, "out_channels": 16, "patch_size": [1, 2, 2],
    "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 1024, "text_dim": 4096,
}  # fmt: skip


_SD3 = {
    "_class_name": "SD3Transformer2DModel", "attention_head_dim": 64, "caption_projection_dim": 1536,
    "dual_attention_layers": list(range(13)), "in_channels": 16, "joint_attention_dim": 4096,
    "num_attention_heads": 24, "num_layers": 24, "out_channels": 16, "patch_size": 2, "pooled_projection_dim": 2048,
    "pos_embed_max_size": 384, "qk_norm": "rms_norm", "sample_size": 128,
}  # fmt: skip
_DIT = {
    "_class_name": "DiTTransformer2DModel", "activation_fn": "gelu-approximate", "attention_bias": True,
    "attention_head_dim": 72, "dropout": 0.0, "in_channels": 4, "norm_elementwise_affine": False, "norm_eps": 1e-05,
    "norm_num_groups": 32, "norm_type": "ada_norm_zero", "num_attention_heads": 16, "num_embeds_ada_norm": 1000,
    "num_layers": 28, "out_channels": 8, "patch_size": 2, "sample_size": 32, "upcast_attention": False,
}  # fmt: skip


def test_dit_of_diffusers_embeds_step_and_class_in_every_block(tmp_path: Path) -> None:
    """27 embedders more than published: two projections of the step's waves and a row per class."""
    native = models.read_architecture({**_DIT, "model_type": _DIT["_class_name"]}, 64)

    assert native == replace(models.spec("dit-xl-2").config, shared=False)
    embedder = 256 * 1152 + 1152 + 1152**2 + 1152 + 1001 * 1152
    count = models.num_parameters(models.build_architecture("dit", native))
    assert count == models.spec("dit-xl-2").num_parameters + 27 * embedder


@pytest.mark.parametrize(("config", "name"), [(_FLUX_DEV, "flux-12b"), (_WAN, "wan-14b"), (_SD3, "sd3.5-medium")])
def test_a_configuration_of_diffusers_is_that_of_the_zoo(config: dict[str, Any], name: str, tmp_path: Path) -> None:
    """`hf:` takes it, without diffusers."""
    (tmp_path / "config.json").write_text(json.dumps(config))

    graph = open_workload(f"hf:{tmp_path}").forward(2)

    assert graph.num_parameters == models.spec(name).num_parameters
    assert models.read_architecture({**config, "model_type": config["_class_name"]}, 64) == models.spec(name).config


@pytest.mark.parametrize(
    ("config", "change", "reason"),
    [
        (_FLUX_DEV, {"axes_dims_rope": [16, 112]}, "axes_dims_rope=[16, 112]"),
        (_FLUX_DEV, {"patch_size": 2}, "in_channels=64 that are not 2 x 2 pixels"),
        (_FLUX_DEV, {"attention_bias": True}, "attention_bias=True"),
        (_SD3, {"dual_attention_layers": [1, 2]}, "dual_attention_layers=[1, 2]"),
        (_SD3, {"caption_projection_dim": 1152}, "caption_projection_dim=1152"),
        (_SD3, {"qk_norm": "layer_norm"}, "qk_norm='layer_norm'"),
        (_DIT, {"norm_type": "layer_norm"}, "norm_type='layer_norm'"),
        (_DIT, {"attention_type": "gated"}, "attention_type='gated'"),
        (_WAN, {"added_kv_proj_dim": 5120}, "added_kv_proj_dim=5120"),
        (_WAN, {"qk_norm": "rms_norm"}, "qk_norm='rms_norm'"),
        (_WAN, {"rope_max_seq_len": 16}, "rope_max_seq_len=16"),
    ],
)
def test_what_a_builder_does_not_know_is_said(config: dict[str, Any], change: dict[str, Any], reason: str) -> None:
    """Every field that is not read is refused."""
    native = models.read_architecture({**config, "model_type": config["_class_name"], **change}, 64)

    assert isinstance(native, models.Unbuilt)
    assert reason in native.reason

"""Exports small random transformers through PyTorch's exporter: `python tests/export_transformers.py FOLDER [NAME]...`.

Needs the extra `torch`. Each model is written to `FOLDER/NAME.onnx`, with its weights inside, unless that file is
there already.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

BATCH, SEQ = 2, 16
LAYERS = 3


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=96, n_positions=SEQ, n_embd=32, n_layer=LAYERS, n_head=4, use_cache=False)
    )


def _bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=SEQ,
    )  # fmt: skip
    return BertForMaskedLM(config)


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=SEQ, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


MODELS: Mapping[str, Callable[[], Any]] = {"gpt2": _gpt2, "bert": _bert, "llama": _llama}
"""Models by name."""

VARIANTS: Mapping[str, tuple[int, bool]] = {"": (20, False), "-opset23": (23, False), "-dynamic": (20, True)}
"""By suffix: opset, and whether batch and sequence are dynamic dims called `batch` and `seq`."""


def build(model_name: str) -> Any:
    """Return a model with the weights its exports have, in eval mode."""
    import torch

    torch.manual_seed(0)
    model = MODELS[model_name]().eval()
    for parameter in model.parameters():
        # Equal tensors (biases of zeros, scales of ones) would be merged by the exporter.
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def names() -> tuple[str, ...]:
    """Return the names of all exports."""
    return tuple(model + variant for model in MODELS for variant in VARIANTS)


def export(name: str, folder: Path) -> Path:
    """Return the file of an export, written on the first call."""
    path = folder / f"{name}.onnx"
    if path.exists():
        return path
    import torch

    model_name, _, suffix = name.partition("-")
    opset, dynamic = VARIANTS[f"-{suffix}" if suffix else ""]
    model = build(model_name)
    tokens = torch.randint(0, 96, (BATCH, SEQ))
    shapes = {"input_ids": {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq")}} if dynamic else None
    program = torch.onnx.export(
        model, (), kwargs={"input_ids": tokens}, dynamo=True, opset_version=opset, dynamic_shapes=shapes, verbose=False
    )
    folder.mkdir(parents=True, exist_ok=True)
    program.save(str(path), external_data=False)
    return path


if __name__ == "__main__":
    for wanted in sys.argv[2:] or names():
        sys.stdout.write(f"{export(wanted, Path(sys.argv[1]))}\n")

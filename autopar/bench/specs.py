"""The models and clusters that `autopar benchmark --all` runs, and small stand-ins for a smoke run.

Figures of all are published in docs/benchmarks/.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from autopar.errors import JobError


@dataclass(frozen=True, slots=True)
class Case:
    """A cluster preset and a number of its devices."""

    cluster: str
    gpus: int


@dataclass(frozen=True, slots=True)
class BenchSpec:
    """A model and the cases it is planned for.

    Attributes:
        name: Name of the benchmark.
        model: `zoo:NAME`.
        sweep: Cases, smallest first.
        tiny: Fields of the model's configuration that make it small enough for a smoke run.
    """

    name: str
    model: str
    sweep: tuple[Case, ...]
    tiny: Mapping[str, int] = field(hash=False)


_GPT_TINY = {"num_layers": 2, "hidden": 64, "heads": 4, "seq": 32, "vocab": 256}
_LLAMA_TINY = {"num_layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "seq": 32, "vocab": 256}

SPECS: Mapping[str, BenchSpec] = {
    item.name: item
    for item in (
        BenchSpec("gpt2", "zoo:gpt2", (Case("h100", 8),), _GPT_TINY),
        BenchSpec("bert-large", "zoo:bert-large", (Case("v100", 16),), _GPT_TINY),
        BenchSpec("llama3-8b", "zoo:llama3-8b", (Case("h100", 64),), _LLAMA_TINY),
        BenchSpec("mixtral-8x7b", "zoo:mixtral-8x7b", (Case("h100", 64),), {**_LLAMA_TINY, "experts": 4}),
        BenchSpec("gpt3-175b", "zoo:gpt3-175b", (Case("a100", 128), Case("a100", 1024)), _GPT_TINY),
        BenchSpec("megatron-1t", "zoo:megatron-1t", (Case("a100", 3072),), _GPT_TINY),
        BenchSpec(
            "wide-resnet-13b",
            "zoo:wide-resnet-13b",
            (Case("v100", 32),),
            {"image_size": 64, "channels": 8, "conv_width": 2, "classes": 16},
        ),
        BenchSpec(
            "unet-sd1",
            "zoo:unet-sd1",
            (Case("v100", 32),),
            {"channels": 8, "blocks": 1, "heads": 2, "context": 8, "tokens": 4, "image_size": 8, "groups": 4},
        ),
    )
}
"""Every benchmark by name."""


def spec(name: str) -> BenchSpec:
    """Return the benchmark called `name`.

    Raises:
        JobError: If there is none.
    """
    if name not in SPECS:
        near = get_close_matches(name, SPECS, n=3, cutoff=0.4) or list(SPECS)
        raise JobError(f"there is no benchmark {name!r}", hint=f"use {' or '.join(near)}")
    return SPECS[name]

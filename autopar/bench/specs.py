"""The models and clusters whose figures are published in docs/benchmarks/, and small stand-ins for a smoke run."""

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


def _cases(cluster: str) -> tuple[Case, ...]:
    return tuple(Case(cluster, gpus) for gpus in (8, 64, 512))


SPECS: Mapping[str, BenchSpec] = {
    item.name: item
    for item in (
        BenchSpec(
            "gpt2", "zoo:gpt2", _cases("h100"), {"num_layers": 2, "hidden": 64, "heads": 4, "seq": 32, "vocab": 256}
        ),
        BenchSpec(
            "llama3-8b",
            "zoo:llama3-8b",
            _cases("h100"),
            {"num_layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "seq": 32, "vocab": 256},
        ),
        BenchSpec(
            "gpt3-175b",
            "zoo:gpt3-175b",
            _cases("a100"),
            {"num_layers": 2, "hidden": 64, "heads": 4, "seq": 32, "vocab": 256},
        ),
        BenchSpec(
            "mixtral-8x7b",
            "zoo:mixtral-8x7b",
            _cases("h100"),
            {
                "num_layers": 2,
                "hidden": 64,
                "heads": 4,
                "kv_heads": 2,
                "ffn": 128,
                "seq": 32,
                "vocab": 256,
                "experts": 4,
            },
        ),
        BenchSpec("resnet50", "zoo:resnet50", _cases("h100"), {"image_size": 64, "channels": 8, "classes": 16}),
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

"""Print what the builders of today's models come to: parameters, seconds, deviation from the libraries they are of.

python docs/benchmarks/models.py [--no-deviations] > docs/benchmarks/models.md

Deviations need PyTorch, transformers and a minute of a core; seconds are of the processor, of an idle core best.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from autopar import models
from autopar.models.architectures import READERS
from autopar.models.published_decoders import CONFIGURATIONS
from tests import test_architectures as decoders
from tests import test_architectures_encoders as encoders
from tests import test_architectures_images as images
from tests.parity import Pairs, deviations
from tests.test_models import EXACT, ROUNDED

SEQ = 1024
HEAD = """\
# Models built from configurations

`python docs/benchmarks/models.py` prints this page.
Per `model_type`: the largest configuration of the tests and the zoo, its trained parameters as built and as published,
processor seconds from the configuration to the ONNX graph without PyTorch and transformers, and the deviation of a tiny
random model from the library's, in float64: of results relative to the largest result, of gradients to the largest
gradient (`tests/parity.py`).
Several tiny models of a type are held to the library; the largest deviation counts.

Published counts are those of released checkpoints where they have all digits, without buffers and fixed tables; *as
stated* is a rounded count of the publisher, to which the built one rounds.
Types without a count have no published one here; types without a deviation are not in transformers, and are held to
diffusers where that is installed (`tests/test_diffusion.py`) or to a reference of our own (`grok-1`).

| type | largest configuration | parameters | published | seconds | results | gradients |
|---|---|---|---|---|---|---|"""


@dataclass(frozen=True, slots=True)
class Published:
    """A published configuration.

    Attributes:
        name: What it is called.
        config: The part of its `config.json` that makes the model; empty for an entry of the zoo.
        parameters: Count of the released checkpoint, or of what is published; 0 if only a rounded one is.
    """

    name: str
    config: Mapping[str, Any]
    parameters: int


def published() -> Iterator[tuple[str, Published]]:
    """Yield the published configurations that are known, by type."""
    for name, config in CONFIGURATIONS.items():
        yield str(config["model_type"]), Published(f"zoo:{name}", config, EXACT.get(name, 0))
    for module in (decoders, encoders, images):
        for name, (count, config) in module.PUBLISHED.items():
            yield str(config["model_type"]), Published(name, config, count)
    for kind, name in (
        ("DiTTransformer2DModel", "dit-xl-2"),
        ("FluxTransformer2DModel", "flux-12b"),
        ("SD3Transformer2DModel", "sd3.5-large"),
        ("WanTransformer3DModel", "wan-14b"),
    ):
        yield kind, Published(f"zoo:{name}", {}, EXACT[name])


def built(item: Published) -> tuple[int, float]:
    """Return the trained parameters of a configuration as built, and the processor seconds of building it."""
    start = time.process_time()
    if item.config:
        native = models.read_architecture(item.config, SEQ)
        assert not isinstance(native, models.Unbuilt), native
        model = models.build_architecture("model", native)
    else:
        model = models.build(item.name.removeprefix("zoo:"))
    seconds = time.process_time() - start
    return models.num_parameters(model), seconds


def measured() -> dict[str, tuple[float, float]]:
    """Return the largest deviations of results and gradients from transformers, by type."""
    found: dict[str, tuple[float, float]] = {}

    def note(kind: str, pairs: Pairs) -> None:
        before, now = found.get(kind, (0.0, 0.0)), deviations(*pairs)
        found[kind] = max(before[0], now[0]), max(before[1], now[1])

    for name in decoders.TINY:
        with pytest.MonkeyPatch.context() as patch:
            note(decoders.config_of(name)["model_type"], decoders.against_transformers(name, patch))
    for name in encoders.TINY:
        note(encoders.config_of(name)["model_type"], encoders.against_transformers(name))
    for name in images.TINY:
        with pytest.MonkeyPatch.context() as patch:
            note(images.config_of(name)["model_type"], images.against_transformers(name, patch))
    return found


def rows(compares: bool) -> Iterator[str]:
    """Yield a row of the table for each type."""
    found = measured() if compares else {}
    known: dict[str, list[tuple[int, float, Published]]] = {}
    models.read_architecture(CONFIGURATIONS["llama3.1-8b"], SEQ)  # imports are no part of the seconds
    for kind, item in published():
        known.setdefault(kind, []).append((*built(item), item))
    for kind in sorted(READERS, key=str.lower):
        count, seconds, item = max(known[kind], key=lambda entry: entry[0]) if kind in known else (0, 0.0, None)
        result, gradient = (f"{value:.0e}" if kind in found else "" for value in found.get(kind, (0.0, 0.0)))
        if item is None:
            yield f"| `{kind}` | | | | | {result} | {gradient} |"
            continue
        rounded = ROUNDED.get(item.name.removeprefix("zoo:"))
        stated = f"{item.parameters:,}" if item.parameters else f"{rounded[0]} G, as stated" if rounded else ""
        yield f"| `{kind}` | {item.name} | {count:,} | {stated} | {seconds:.2f} | {result} | {gradient} |"


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-deviations", action="store_true", help="leave out what needs PyTorch")
    options = parser.parse_args()
    sys.stdout.write(HEAD + "\n")
    for row in rows(not options.no_deviations):
        sys.stdout.write(row + "\n")


if __name__ == "__main__":
    main()

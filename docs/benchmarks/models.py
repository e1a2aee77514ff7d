"""Print what the builders of today's models come to: parameters, seconds, deviation from the libraries they are of.

python docs/benchmarks/models.py [--no-deviations] > docs/benchmarks/models.md

Deviations need PyTorch, transformers, diffusers for those of diffusion transformers, and two minutes of a core; seconds
are of the processor.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest

from autopar import models
from autopar.discover.notation import format_rule
from autopar.models.architectures import READERS
from autopar.models.dual_encoder_reader import DUAL_ENCODERS
from autopar.models.encoder_decoder_reader import ENCODER_DECODERS
from autopar.models.encoder_reader import ENCODERS
from autopar.models.image_text_reader import IMAGE_TEXT
from autopar.models.published_decoders import CONFIGURATIONS
from autopar.report.rules import select_rules
from autopar.workload import open_workload
from tests import test_architectures as decoders
from tests import test_architectures_encoders as encoders
from tests import test_architectures_images as images
from tests import test_diffusion as diffusion
from tests.executions import TINY
from tests.parity import Pairs, deviations
from tests.test_models import EXACT, ROUNDED

SEQ, SHORT_SEQ, LONG_SEQ = 1024, 64, 2048
"""Tokens of decoders; of encoders and encoder-decoders, which take fewer; of models of images and text, whose patches
are many. No parameter depends on them."""
_SHORT = {*ENCODERS, *ENCODER_DECODERS, *DUAL_ENCODERS}
HEAD = """\
# Models built from configurations

`python docs/benchmarks/models.py` prints this page.
Per `model_type`: the largest configuration of the tests and the zoo, its trained parameters as built and as published,
and processor seconds from the configuration to the ONNX graph, without PyTorch and transformers.
Published counts are those of released checkpoints where they have all digits, without buffers and fixed tables; *as
stated* is a rounded count of the publisher, to which the built one rounds.

Every other `model_type` that transformers knows is left to the PyTorch export (`pip install "autopar[torch]"`), and so
is a configuration that says what the builder of its type does not know, such as another class in `architectures`, an
unknown `rope_scaling`, `attention_bias` or an entry of `layer_types`: without PyTorch that is an error with the field
and its value.
"""
HELD = """\
Slow tests hold a tiny random model of each type to transformers, in float64: results and gradients to 1e-6
(`tests/test_architectures*.py`); diffusion transformers to diffusers where that is installed
(`tests/test_diffusion.py`), `grok-1` to a reference of our own.
"""
MEASURED = """\
Deviations are the largest of the tiny random models of a type, in float64: of results relative to the largest result,
of gradients relative to the largest gradient.
They are of the code of the slow tests, which fail above 1e-6 (`tests/parity.py`, `tests/test_architectures*.py`,
`tests/test_diffusion.py`).
Most are held to transformers, diffusion transformers to diffusers, `grok-1` to a reference of our own; `kimi_k2` is
read by the code of `deepseek_v3` and has its deviations.
"""


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

    @property
    def rounded(self) -> float:
        """Billions of parameters that are published rounded; 0 if all digits are."""
        return ROUNDED.get(self.name.removeprefix("zoo:"), (0.0, 0))[0]

    @property
    def size(self) -> float:
        """Parameters, all digits or not."""
        return self.parameters or 1e9 * self.rounded


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
        kind = item.config["model_type"]
        seq = SHORT_SEQ if kind in _SHORT else LONG_SEQ if kind in IMAGE_TEXT else SEQ
        native = models.read_architecture(item.config, seq)
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
    note("grok-1", decoders.grok_against_reference())
    if find_spec("diffusers") is not None:
        for name, pairs in diffusion.DIFFUSERS.items():
            with pytest.MonkeyPatch.context() as patch:
                note(name.split(",")[0], pairs(patch))
    like = {READERS[kind]: values for kind, values in found.items()}
    return {kind: found.get(kind, like[reader]) for kind, reader in READERS.items() if reader in like}


def rows(compares: bool) -> Iterator[str]:
    """Yield a row of the table for each type."""
    found = measured() if compares else {}
    columns = ["type", "largest configuration", "parameters", "published", "seconds"]
    columns += ["results", "gradients"] if compares else []
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    known: dict[str, list[Published]] = {}
    for kind, item in published():
        known.setdefault(kind, []).append(item)
    built(known["gpt2"][0])  # imports are no part of the seconds
    for kind in sorted(READERS, key=str.lower):
        cells = [f"`{kind}`", *[""] * 4]
        if kind in known:
            item = max(known[kind], key=lambda own: own.size)
            count, seconds = built(item)
            stated = f"{item.parameters:,}" if item.parameters else f"{item.rounded:g} G, as stated"
            cells[1:] = item.name, f"{count:,}", stated, f"{seconds:.2f}"
        if compares:
            cells += [f"{value:.0e}" for value in found[kind]] if kind in found else ["", ""]
        yield f"| {' | '.join(cells)} |"


SHOWN: Sequence[tuple[str, str, Mapping[str, int], tuple[str, ...]]] = (
    ("latent attention", "deepseek-v3", {}, ("Attention", "autopar::AttentionGrad")),
    ("latent attention, decoding", "deepseek-v3", {"seq": 1, "cached": 6}, ("autopar::CachedLatentAttention",)),
    (
        "grouped products",
        "qwen3-30b-a3b",
        {},
        tuple(
            f"autopar::{name}"
            for name in (
                "ExpertDispatch", "GroupedMatMul", "ExpertCombine", "ExpertCombineGrad", "GroupedMatMulGrad",
                "GroupedMatMulWeightGrad", "ExpertSum",
            )
        ),
    ),
    ("scan of Mamba 2", "mamba2-2.7b", {}, ("autopar::StateSpaceScan", "autopar::StateSpaceScanGrad")),
    ("scan of Mamba", "mamba-2.8b", {}, ("autopar::SelectiveScan", "autopar::SelectiveScanGrad")),
    ("gated delta rule", "qwen3-next-80b-a3b", {}, ("autopar::GatedDeltaRule", "autopar::GatedDeltaRuleGrad")),
    (
        "scan of Mamba 2, decoding",
        "mamba2-2.7b",
        {"seq": 1, "cached": 6},
        ("autopar::CachedStateSpaceScan", "autopar::CachedConvolution"),
    ),
)  # fmt: skip
"""What a row of the second table is of, a model of the zoo, its sizes, and kinds of ops."""
FOUND = """
## What discovery finds

Rules of ops of tiny models of the zoo, found by running each op whole and on shards, as `autopar rules` prints them: a
letter is a strategy that shards all dims which bear it, `a: sum` makes terms of a sum with `a` sharded.
Nothing says which dims are heads, experts or channels.

| op of | model | op | rule |
|---|---|---|---|
"""


def discovered() -> Iterator[str]:
    """Yield a row of the second table for each distinct rule of latent attention, grouped products and scans."""
    for what, name, sizes, kinds in SHOWN:
        mode = "infer" if sizes else "train"
        workload = open_workload(f"zoo:{name}", mode=mode, dims={**TINY[name], **sizes})
        rules = workload.rules()
        for kind in kinds:
            for rule, _ in select_rules(rules, kind):
                text = format_rule(rule).replace("|", "\\|")
                yield f"| {what} | `{name}` | `{kind}` | `{text}` |"


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-deviations", action="store_true", help="leave out what needs PyTorch")
    options = parser.parse_args()
    sys.stdout.write(f"{HEAD}\n{HELD if options.no_deviations else MEASURED}\n")
    for row in rows(not options.no_deviations):
        sys.stdout.write(row + "\n")
        sys.stdout.flush()
    sys.stdout.write(FOUND)
    for row in discovered():
        sys.stdout.write(row + "\n")


if __name__ == "__main__":
    main()

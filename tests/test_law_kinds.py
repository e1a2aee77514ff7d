"""The law for every kind of parallelism that has a name: three steps train like the unpartitioned model."""

from functools import cache
from pathlib import Path

import pytest

from autopar.search.space import Configuration
from autopar.sharding import Mesh
from tests.executions import TINY, Execution, model_rules
from tests.named_plans import Data, Expert, Free, Megatron, Task, Vocabulary, check_kind, named_plan

SAMPLES, STEPS = 4, 3
ONE, TWO = Mesh.of(inner=2), Mesh.of(outer=2, inner=2)
TRANSFORMERS = ("gpt2", "llama3-8b", "bert-base", "vit-b16")
LANGUAGE = ("gpt2", "llama3-8b", "mixtral-8x7b")

KINDS: dict[str, tuple[tuple[Task, ...], Configuration, tuple[str, ...]]] = {
    "data": ((Data(),), Configuration(1, ONE, 2, "1f1b"), tuple(TINY)),
    "tensor": ((Megatron(),), Configuration(1, ONE, 2, "1f1b"), TRANSFORMERS),
    "sequence": ((Megatron(sequence=True),), Configuration(1, ONE, 2, "1f1b"), TRANSFORMERS[:3]),
    "vocabulary": ((Vocabulary(),), Configuration(1, ONE, 2, "1f1b"), LANGUAGE),
    "expert": ((Expert(),), Configuration(1, Mesh.of(inner=4), 2, "1f1b"), ("mixtral-8x7b",)),
    "zero-1": ((Data(1),), Configuration(1, ONE, 2, "1f1b"), tuple(TINY)),
    "zero-2": ((Data(2),), Configuration(1, ONE, 2, "1f1b"), tuple(TINY)),
    "zero-3": ((Data(3),), Configuration(1, ONE, 2, "1f1b"), tuple(TINY)),
    "gpipe": ((Free(),), Configuration(3, ONE, 3, "gpipe"), tuple(TINY)),
    "1f1b": ((Free(),), Configuration(3, ONE, 3, "1f1b"), tuple(TINY)),
    "data×tensor": ((Data(1), Megatron()), Configuration(2, TWO, 2, "1f1b"), TRANSFORMERS),
    "zero-3×sequence": ((Data(3), Megatron(sequence=True)), Configuration(2, TWO, 2, "gpipe"), TRANSFORMERS[:3]),
    "zero-2×expert": ((Data(2), Expert()), Configuration(2, TWO, 2, "1f1b"), ("mixtral-8x7b",)),
    "data×vocabulary": ((Data(), Vocabulary()), Configuration(2, TWO, 2, "1f1b"), LANGUAGE),
}


@cache
def _execution(model: str, count: int) -> Execution:
    return Execution.of(model, SAMPLES, count, steps=STEPS)


@pytest.mark.parametrize(("kind", "model"), [(kind, model) for kind in KINDS for model in KINDS[kind][2]])
def test_plans_of_a_kind_train_like_the_model(kind: str, model: str, cache_dir: Path) -> None:
    tasks, configuration, _ = KINDS[kind]
    execution, rules = _execution(model, configuration.num_microbatches), model_rules(model, cache_dir)
    plan = named_plan(model, execution.folded, rules, configuration, tasks, SAMPLES)

    check_kind(plan, model, execution.folded, tasks, SAMPLES)
    execution.check(plan)

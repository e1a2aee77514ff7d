"""Modules that run again: found from the structure of a block, held to the law, and told to Megatron-LM."""

from collections.abc import Mapping
from dataclasses import replace
from math import fsum
from pathlib import Path

import pytest

from autopar.cluster import load_cluster
from autopar.configuration import Configuration
from autopar.cost import IDEAL, CostModel, stack_from_dict
from autopar.cost.stack import Attention
from autopar.degrees import Degrees
from autopar.errors import StackError
from autopar.folding.recompute_modules import MODULES
from autopar.folding.selective_recompute import modules_of, selective_ops
from autopar.frameworks.configurations import parse_configuration
from autopar.frameworks.restriction import stack_kept_to
from autopar.prediction import predict
from autopar.recompute import RECOMPUTE_MODULES, Recompute
from autopar.sharding import Mesh
from autopar.simulate import simulate
from autopar.workload import open_workload
from tests.executions import COSTS, TINY, Execution, model_rules
from tests.named_plans import Free, named_plan

SAMPLES = 4
DEEPSEEK: Mapping[str, set[str]] = {
    "core_attn": {"attn.core"},
    "layernorm": {"attn_norm", "mlp_norm"},
    "moe_act": {"moe.swish", "moe.gated"},
    "shared_experts": {"moe.shared.gate", "moe.shared.swish", "moe.shared.up", "moe.shared.gated"},
    "activation": {"moe.shared.swish", "moe.shared.gated"},
}
"""Ops of a layer of DeepSeek-V3 with experts, by module; MLA and whole mixtures are told by what they begin with."""
MODELS: Mapping[str, tuple[str, ...]] = {
    "gpt2": ("core_attn", "layernorm", "activation", "mlp"),
    "llama3-8b": ("core_attn", "layernorm", "activation", "mlp"),
    "qwen3-30b-a3b": ("core_attn", "layernorm", "moe_act", "moe"),
    "deepseek-v3": tuple(RECOMPUTE_MODULES),
    "mamba2-2.7b": ("layernorm",),
}
"""Modules of the layers of some models."""


def _ops(model: str) -> dict[str, set[str]]:
    """Return the ops of all layers by module, without the number of the layer."""
    found: dict[str, set[str]] = {}
    for kind in modules_of(Execution.of(model, SAMPLES, 1).folded, COSTS):
        for module, names in kind.items():
            found.setdefault(module, set()).update(name.split(".", 2)[-1] for name in names if "layers" in name)
    return {module: names for module, names in found.items() if names}


def test_the_table_has_a_row_for_every_name() -> None:
    assert tuple(MODULES) == RECOMPUTE_MODULES


@pytest.mark.parametrize("model", MODELS)
def test_modules_are_found_from_the_structure(model: str) -> None:
    assert set(_ops(model)) == set(MODELS[model])


def test_modules_of_latent_attention_and_experts_have_their_ops() -> None:
    """The up-projections read latent values; a router belongs to the mixture, not to its activation function."""
    found = _ops("deepseek-v3")

    assert {module: found[module] - _ops_of_dense() for module in DEEPSEEK} == {
        module: names - _ops_of_dense() for module, names in DEEPSEEK.items()
    }
    assert {"attn.q_latent_norm", "attn.q_plain", "attn.latent_norm", "attn.k_plain", "attn.v"} <= found["mla_up_proj"]
    assert "attn.q_latent" not in found["mla_up_proj"]
    assert {"moe.router.logits", "moe.dispatch", "moe.gate", "moe.shared.up"} <= found["moe"]
    assert not any("router" in name for name in found["moe_act"])


def _ops_of_dense() -> set[str]:
    return {"mlp.swish", "mlp.gated", "mlp.gate", "mlp.up"}


LAW = [
    pytest.param(
        model,
        module,
        id=f"{model}-{module}",
        marks=() if (model, module) == ("llama3-8b", "mlp") else pytest.mark.slow,
    )
    for model, modules in MODELS.items()
    for module in dict.fromkeys((*modules, "+".join(modules)))
]


@pytest.mark.parametrize(("model", "module"), LAW)
def test_modules_that_run_again_change_no_number(model: str, module: str, cache_dir: Path) -> None:
    """Partitioned equals unpartitioned; what runs again takes time."""
    execution, modules = Execution.of(model, SAMPLES, 2, steps=2), tuple(module.split("+"))
    rules = model_rules(model, cache_dir)
    configuration = Configuration(2, Mesh.of(inner=2), 2, "1f1b")

    plan = named_plan(
        model, execution.folded, rules, configuration, (Free(),), SAMPLES,
        recompute=Recompute.SELECTIVE, modules=modules,
    )  # fmt: skip

    assert any(block.selective for block in plan.blocks)
    execution.check(plan)
    kept = replace(plan, stages=tuple(replace(stage, recompute="none") for stage in plan.stages))
    again, whole = (
        fsum(stage.compute_seconds for stage in simulate(execution.program(own), COSTS).stages) for own in (plan, kept)
    )
    assert again > whole


@pytest.mark.parametrize(
    ("model", "attention", "expected"),
    [
        ("deepseek-v3", "fused", {"layernorm", "mla_up_proj", "activation", "moe_act"}),
        ("llama3-8b", "fused", {"layernorm", "activation"}),
        ("llama3-8b", "unfused", {"layernorm", "activation", "core_attn"}),
    ],
)
def test_modules_among_which_the_rule_chooses_are_cheap_for_their_bytes(
    model: str, attention: Attention, expected: set[str]
) -> None:
    """Up-projections of small latent values are; MLPs and mixtures are as dear as the bytes they free."""
    folded = open_workload(f"zoo:{model}", dims={"num_layers": 4}).folded(1)
    costs = CostModel(load_cluster("h100"), stack=replace(IDEAL, attention=attention))

    chosen = selective_ops(folded, replace(costs, stack=replace(costs.stack, recompute_among=RECOMPUTE_MODULES)))

    names = {folded.kinds[kind].ops[own].name for kind, ops in enumerate(chosen) for own in ops}
    each = modules_of(folded, costs)
    found = {name for kind in each for name, ops in kind.items() if ops <= names}
    assert found == expected


def test_stacks_name_modules() -> None:
    stack = replace(IDEAL, recompute_modules=("moe", "core_attn"), recompute_among=("mlp",))

    assert stack.recompute_modules == ("core_attn", "moe")
    assert stack_from_dict(stack.to_dict()) == stack
    with pytest.raises(StackError, match="recompute_modules has 'head'"):
        replace(IDEAL, recompute_modules=("head",))


def test_megatron_is_told_the_modules_and_reads_them_back(cache_dir: Path) -> None:
    """And what the file comes to is predicted with these."""
    plan = predict(
        "zoo:llama3-8b", Degrees(dp=2, recompute="selective", global_batch=4), dims=TINY["llama3-8b"],
        recompute_modules=("mlp", "layernorm"), cache_dir=cache_dir,
    ).plan  # fmt: skip

    exported = plan.export("megatron", cache_dir=cache_dir)

    assert "--recompute-modules layernorm mlp\n" in exported.text
    assert not any("run again" in sentence for sentence in exported.lost)
    read = parse_configuration(exported.text, "megatron", gpus=2, model="zoo:llama3-8b")
    assert read.degrees.recompute == "selective"
    assert read.stack(IDEAL).recompute_modules == ("layernorm", "mlp")


def test_searches_for_megatron_choose_among_its_modules() -> None:
    """Activation functions of dense MLPs are none of them; FSDP2 is told nothing."""
    among = stack_kept_to("megatron", "ideal", "h100").recompute_among

    assert set(RECOMPUTE_MODULES) - set(among) == {"activation"}
    assert stack_kept_to("fsdp", "ideal", "h100").recompute_among == ()

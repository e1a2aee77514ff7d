"""Modules that run again: found from the structure of a block, held to the law, and told to Megatron-LM."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import fsum
from pathlib import Path

import pytest

from autopar.cluster import load_cluster
from autopar.configuration import Configuration
from autopar.cost import IDEAL, CostModel, stack_from_dict
from autopar.cost.stack import Attention, Selective
from autopar.degrees import Degrees
from autopar.errors import ExportError, StackError
from autopar.folding.fold import BlockKind, Folded
from autopar.folding.recompute_modules import MODULES
from autopar.folding.selective_recompute import modules_of, selective_ops
from autopar.frameworks.configurations import parse_configuration
from autopar.frameworks.restriction import stack_kept_to
from autopar.prediction import predict
from autopar.recompute import RECOMPUTE_MODULES, Recompute
from autopar.sharding import Mesh
from autopar.simulate import simulate
from autopar.units import format_bytes
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


def test_torchtitan_decides_itself_what_runs_again() -> None:
    """It has one list of ops, whatever a stack says; DeepSpeed's models say it in their code."""
    stated = replace(IDEAL, recompute_modules=("mlp",), recompute_among=("mlp",))

    own = stack_kept_to("torchtitan", stated, "h100")

    assert (own.selective, own.recompute_modules, own.recompute_among) == ("alternate", (), ())
    assert stack_kept_to("deepspeed", stated, "h100", ("mlp",)).recompute_modules == ("mlp",)


@pytest.mark.parametrize(
    ("framework", "modules", "message", "hint"),
    [
        ("torchtitan", ("mlp",), "torchtitan cannot be told to run mlp again", "leave --recompute-modules out"),
        ("fsdp", ("core_attn",), "FSDP2 cannot be told to run core_attn again", "leave --recompute-modules out"),
        (
            "megatron",
            ("mlp", "activation"),
            "Megatron-LM cannot be told to run activation again",
            "core_attn, layernorm",
        ),
    ],
)
def test_modules_that_a_framework_does_not_know_are_refused(
    framework: str, modules: tuple[str, ...], message: str, hint: str
) -> None:
    with pytest.raises(ExportError, match=message) as caught:
        stack_kept_to(framework, "ideal", "h100", modules)

    assert hint in caught.value.hint


def test_torchtitan_is_predicted_without_the_modules_of_a_plan(cache_dir: Path) -> None:
    """What its file comes to is what its own list of ops comes to, and the file says that the list is another one."""
    sizes = {"num_layers": 2, "hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 1408, "seq": 512, "vocab": 4096}
    degrees = Degrees(dp=2, zero=2, recompute="selective", microbatch=2, global_batch=4)
    stack = replace(IDEAL, loss="fused")
    plan = predict(
        "zoo:llama3-8b", degrees, dims=sizes, stack=stack, recompute_modules=("mlp",), cache_dir=cache_dir
    ).plan

    exported = plan.export("torchtitan", cache_dir=cache_dir)

    alternate = predict(
        "zoo:llama3-8b", degrees, dims=sizes, stack=replace(stack, selective="alternate"), cache_dir=cache_dir
    ).plan
    assert plan.simulated is not None
    assert alternate.simulated is not None
    own, stated = (
        format_bytes(max(stage.peak for stage in each.stages)) for each in (alternate.simulated, plan.simulated)
    )
    assert own != stated
    assert f"peak {own} of" in exported.outcome
    assert any("torchtitan's own list of ops decides" in sentence for sentence in exported.lost)


@pytest.mark.parametrize("selective", ["cheap", "alternate"])
@pytest.mark.parametrize(
    ("model", "exchanges"),
    [
        ("qwen3-30b-a3b", {"moe.dispatch", "moe.arrived", "moe.down", "moe.returned"}),
        ("mixtral-8x7b", {"moe.dispatch", "moe.down", "moe.combine"}),
    ],
)
def test_selective_recompute_sends_no_token_twice(model: str, exchanges: set[str], selective: Selective) -> None:
    """A second dispatch, or return, takes an all-to-all, which the seconds of a rerun on one device leave out."""
    folded = open_workload(f"zoo:{model}", dims={"num_layers": 2, "seq": 512}).folded(2)

    chosen = selective_ops(folded, replace(COSTS, stack=replace(COSTS.stack, selective=selective)))

    ops = {kind.ops[own].name.split(".", 2)[-1] for kind, own in _chosen(folded, chosen)}
    assert "moe.gated" in ops
    assert exchanges <= {op.name.split(".", 2)[-1] for kind in folded.kinds for op in kind.ops}
    assert not ops & exchanges


def _chosen(folded: Folded, chosen: tuple[frozenset[int], ...]) -> Iterator[tuple[BlockKind, int]]:
    """Yield the kind of block and the position of every op that runs again."""
    for kind, ops in zip(folded.kinds, chosen, strict=True):
        for own in ops:
            yield kind, own

"""Published rows expressed, predicted and scored; stacks that are found again by calibration."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from autopar.cli import main
from autopar.cluster import load_cluster
from autopar.cost.stack import Stack, format_stack, load_stack
from autopar.errors import DataError
from autopar.models.decoder_config import Attention, DecoderConfig, Experts
from autopar.models.published_decoders import PublishedConfig
from autopar.training import Lora
from autopar.validation.calibrate import fit_prepared, prepare
from autopar.validation.completion import InexpressibleError, complete
from autopar.validation.express import Case, express
from autopar.validation.gates import by_class, memory_errors, posed, rivals
from autopar.validation.recipes import RECIPES
from autopar.validation.records import MemoryKind, Row, load_rows
from autopar.validation.report import format_calibration, format_validation, to_dicts
from autopar.validation.run import Outcome, predict_case, predict_row, predict_rows, predictor, shown_bytes
from autopar.validation.score import errors, rankings
from autopar.validation.stacks import STACKS, meant_stack, stack_for

_GPT: dict[str, Any] = {
    "framework": "Megatron-LM 2021", "model": "GPT", "arch": "gpt", "layers": 4, "hidden": 1024, "heads": 16,
    "kv_heads": 16, "ffn": 4096, "vocab": 51200, "seq": 1024, "gpu": "A100-SXM-80GB", "gpus_per_node": 8,
    "n_gpus": 8, "tp": 1, "pp": 1, "dp": 8, "micro_batch": 4, "global_batch": 64, "zero": 0, "recompute": "none",
    "schedule": "1F1B", "precision": "fp16", "step_time_s": 1.0,
}  # fmt: skip
_PLANS: list[dict[str, Any]] = [
    {"tp": tp, "pp": pp, "dp": 8 // (tp * pp), "micro_batch": size, "recompute": redo}
    for tp, pp in ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (1, 4))
    for size in (1, 4)
    for redo in ("none", "full")
]


def _row(number: int = 1, **changes: Any) -> Row:
    return msgspec.convert({"id": f"made-{number:04d}", **_GPT, **changes}, Row)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Path:
    """Return a folder of rows that ran on a stack whose scalars are known: measured is what is predicted for it."""
    folder = tmp_path_factory.mktemp("data")
    truth = meant_stack("Megatron-LM", "A100").with_scalars(gemm_efficiency=0.8, memory_traffic=1.6, step_seconds=0.02)
    rows = []
    for number, plan in enumerate(_PLANS):
        row = _row(number, **plan)
        _, found = predict_case(express(row), truth, cache_dir)
        rows.append({"id": row.id, **_GPT, **plan, "step_time_s": found.timeline.step_seconds, "memory_gb": 10.0})
    rows.append({"id": "odd-1", "framework": "Megatron-LM", "gpu": "abacus", "n_gpus": 3, "step_time_s": 1.0})
    (folder / "train.json").write_text(json.dumps(rows))
    return folder


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"dp": 8, "zero": 0, "recompute": "none", "microbatch": 4, "schedule": "1f1b", "interleave": 1}),
        ({"zero": "distributed optimizer"}, {"zero": 1}),
        ({"zero": "FSDP"}, {"zero": 3}),
        ({"zero": "ZeRO-1 group=8"}, {"zero": 1}),
        ({"zero": 2}, {"zero": 1}),
        ({"framework": "llm-foundry/Composer FSDP", "zero": 2}, {"zero": 2}),
        ({"recompute": "selective (attention)"}, {"recompute": "selective"}),
        ({"recompute": "full (use_checkpoint=true)"}, {"recompute": "full"}),
        ({"dp": None}, {"dp": 8}),
        ({"micro_batch": None, "num_microbatches": 4}, {"microbatch": 2}),
        ({"pp": 2, "dp": 4, "vpp": 2}, {"pp": 2, "interleave": 2}),
        ({"pp": 2, "dp": 4, "vpp": "max (each layer a chunk)"}, {"interleave": 2}),
        ({"pp": 2, "dp": 4, "schedule": "ZB-2p"}, {"schedule": "zb-h2"}),
        ({"tp": 2, "dp": 4, "framework": "Megatron-Core 0.8"}, {"sequence_parallel": True}),
        ({"tp": 2, "dp": 4}, {"sequence_parallel": False}),
    ],
)
def test_rows_are_expressed_by_rules(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    """What a row states in its source's words becomes degrees."""
    degrees = express(_row(**changes)).degrees

    assert {name: getattr(degrees, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"step_time_s": None}, "has no step time"),
        ({"gpu": "abacus"}, "device 'abacus' has no preset"),
        ({"gpu": None}, "does not state gpu"),
        ({"layers": None, "hidden": None}, "does not state layers, hidden"),
        ({"tp": 3, "dp": None}, "are not 8 devices"),
        ({"arch": "t5"}, "the zoo has no family for 't5'"),
        ({"schedule": "v-half"}, "schedule 'v-half' is not known"),
        ({"micro_batch": 3}, "a global batch of 64 does not divide by dp 8 x microbatch 3"),
        ({"heads": 7, "kv_heads": 7}, "hidden size 1024 is not divisible by 7 heads"),
        ({"seq": None, "framework": "other"}, "does not state seq"),
        ({"model": "DeepSeek-V3", "layers": 4, "hidden": 7168, "heads": 128}, "layers 4, where deepseek-v3 has 61"),
    ],
)
def test_what_cannot_be_expressed_has_a_reason(changes: dict[str, Any], reason: str) -> None:
    """No row is dropped silently."""
    with pytest.raises(InexpressibleError, match=reason.replace("(", r"\(")):
        express(_row(**changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"source": "NVIDIA/dgxc-benchmarking v25.02.02:nemotron/README_15b.md", "zero": None, "recompute": None,
          "tp": 2, "dp": 4},
         {"zero": 1, "recompute": "none", "sequence_parallel": True}),
        ({"source": "NVIDIA/dgxc-benchmarking v24.11.1:paxml/README_5b.md", "zero": None, "recompute": None,
          "n_gpus": 16, "dp": 16},
         {"zero": 3, "shard": 8, "recompute": "selective"}),
        ({"source": "NVIDIA/dgxc-benchmarking v25.02.02:maxtext/README_70b.md", "zero": None, "recompute": None},
         {"zero": 3, "shard": 0, "recompute": "full"}),
        ({"framework": "Megatron-LM best hand-tuned", "origin": "Dazz993/Mist d69e530", "zero": None,
          "recompute": "not recorded in the script row"},
         {"zero": 1, "recompute": "full"}),
        ({"origin": "training_results_v4.1: Oracle/results/gpt3", "tp": None, "pp": None, "dp": None, "zero": None,
          "micro_batch": None, "n_gpus": 1536, "global_batch": 3072, "as_published": {"grad_accum": 32}, "layers": 96},
         {"tp": 4, "pp": 8, "dp": 48, "interleave": 4, "microbatch": 2}),
        ({"framework": "NeMo (Megatron-Core)", "layers": 30, "pp": 4, "tp": 2, "dp": 1, "zero": 1},
         {"layers": (7, 8, 8, 7)}),
        ({"framework": "NeMo (Megatron-Core)", "layers": 6, "pp": 2, "dp": 4, "vpp": 2,
          "as_published": {"asym_pp": ["True", "True"]}},
         {"layers": (1, 2, 2, 1)}),
        ({"framework": "NeMo (Megatron-Core)", "pp": 4, "dp": 2}, {"layers": ()}),
        ({"tp": 2, "dp": 1, "ep": 4, "num_experts": 8, "moe_ffn": 512, "arch": "moe"}, {"dp": 4, "ep": 4}),
        ({"as_published": {"fsdp": True}, "zero": None}, {"zero": 3}),
        ({"as_published": {"local_batch": 2}, "global_batch": None, "micro_batch": None},
         {"global_batch": 16, "microbatch": 2}),
        ({"tp": None, "pp": 2, "dp": None, "recompute": None, "as_published": {
            "num_gpus_per_stage": [4, 4], "tp_per_stage": [[2], [2]], "dp_per_stage": [[2], [2]],
            "recompute_op_fraction_per_stage": [0.99, 1.0]}},
         {"tp": 2, "dp": 2, "recompute": "full"}),
    ],
)  # fmt: skip
def test_what_a_row_omits_is_filled(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    """From what its source says elsewhere, from its recipe, or by arithmetic."""
    degrees = express(
        _row(**{"source" if name == "origin" else name: value for name, value in changes.items()})
    ).degrees

    assert {name: getattr(degrees, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"as_published": {"input_len": 128}}, "measures inference"),
        ({"source": "training_results_v5.1: Dell/results/llama2_70b_lora", "gpu": "NVIDIA Blackwell GPU (B200)",
          "precision": None}, "does not state precision, which recipe"),
        ({"as_published": {"num_gpus_per_stage": [6, 2], "tp_per_stage": [[1], [1]]}}, "stages differ in devices"),
        ({"as_published": {"num_gpus_per_stage": [4, 4], "tp_per_stage": [[1], [1]], "dp_per_stage": [[4], [4]],
                           "recompute_op_fraction_per_stage": [0.5, 0.1]}}, "recompute different parts"),
    ],
)  # fmt: skip
def test_what_degrees_cannot_say_has_a_reason(changes: dict[str, Any], reason: str) -> None:
    """Stages that differ, and recipes with several values for a field, are no guess."""
    with pytest.raises(InexpressibleError, match=reason):
        express(_row(**changes))


def test_recipes_never_change_what_a_row_states() -> None:
    """A stated field wins over every recipe, and what was filled is told."""
    origin = "NVIDIA/dgxc-benchmarking v25.02.02:llama3.1/README_70b.md"

    row, notes = complete(_row(source=origin, zero=0, recompute=None, framework=None))

    assert (row.zero, row.recompute, row.framework) == (0, "none", "NeMo (Megatron-Core)")
    assert notes == ("recipe: DGXC with NeMo", "recipe: DGXC with user buffers")


def test_every_recipe_has_a_source_and_fills_known_fields() -> None:
    """The table is data: a field that no row has would be filled in vain."""
    for recipe in RECIPES:
        assert recipe.source, recipe.name
        assert set(recipe.fills) | set(recipe.where) | set(recipe.leaves_open) <= set(Row.__struct_fields__), (
            recipe.name
        )


_DEEPSEEK: dict[str, Any] = {
    "model": "DeepSeek-V3", "arch": "moe-mla", "layers": 61, "hidden": 7168, "heads": 128, "kv_heads": 128,
    "ffn": 18432, "vocab": 129280, "seq": 4096, "tp": 1, "cp": 1, "n_gpus": 256, "micro_batch": 1, "zero": 1,
    "global_batch": 4096, "num_microbatches": None, "step_time_s": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("published", "expected"),
    [
        ({"features": "DeepEP; EP overlap"}, ("per-node", True, "none")),
        ({"features": "paged stash; full CG; HybridEP"}, ("per-node", False, "full")),
        ({"features": "MXFP8; partial CG"}, ("all-to-all", False, "partial")),
        ({"moe": "capacity factor 1, padded to capacity, alltoall dispatcher"}, ("all-to-all", False, "none")),
        ({"kernels": "TE + DeepEP + FlexAttn"}, ("per-node", False, "none")),
        ({}, ("all-to-all", False, "none")),
    ],
)
def test_what_a_source_says_of_dispatchers_and_graphs_is_taken(
    published: dict[str, str], expected: tuple[str, bool, str]
) -> None:
    """Whatever else the stack of the framework is."""
    stack = express(_row(as_published=published)).stack

    assert (stack.dispatch, stack.hides_dispatch, stack.graphs) == expected


@pytest.mark.parametrize(
    ("version", "gpu", "precision", "model", "expected"),
    [
        ("26.04.01", "GB200", "MXFP8", "Qwen3-30B-A3B", ("each", "partial", False)),
        ("26.06", "GB200", "MXFP8", "Qwen3-30B-A3B", ("fused", "full", True)),
        ("26.06.01", "GB300", "MXFP8", "Qwen3-235B-A22B", ("fused", "full", True)),
        ("26.06.01", "GB300", "BF16", "Qwen3-235B-A22B", ("each", "partial", False)),
        ("26.06", "B300", "MXFP8", "Qwen3-235B-A22B", ("each", "none", False)),
        ("26.06.01", "B300", "MXFP8", "Qwen3-235B-A22B", ("fused", "full", True)),
        ("26.10", "B200", "MXFP8", "Qwen3-30B-A3B", ("each", "none", False)),
    ],
)
def test_kernels_of_experts_are_known_by_version(
    version: str, gpu: str, precision: str, model: str, expected: tuple[str, str, bool]
) -> None:
    """Fused kernels, full CUDA graphs and hidden dispatch came to Megatron-Bridge with 26.06, in MXFP8."""
    sizes: dict[str, Any] = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"))

    stack = express(
        _row(framework=f"Megatron-Bridge ({version} NeMo Container) pretrain", gpu=gpu, precision=precision,
             model=model, arch="moe", ep=8, dp=8, n_gpus=8, tp=1, pp=1, global_batch=64, micro_batch=1, **sizes)
    ).stack  # fmt: skip

    assert (stack.experts, stack.graphs, stack.hides_dispatch) == expected


_BRIDGE_26_04 = "Megatron-Bridge (26.04 NeMo Container) pretrain"


@pytest.mark.parametrize(
    ("fields", "dispatch", "modules"),
    [
        ({"framework": "Megatron-Core 0.15"}, "per-node", ()),
        ({"source": "NVIDIA/dgxc-benchmarking v25.04.02:grok1/README.md", "framework": None}, "all-to-all", ()),
        ({"source": "NVIDIA/NeMo performance_summary, 25.07", "framework": None}, "all-to-all", ()),
        ({"framework": _BRIDGE_26_04, "model": "DeepSeek-V3"}, "per-node", ("mla_up_proj", "mlp")),
        ({"framework": _BRIDGE_26_04, "model": "Qwen3-30B-A3B"}, "per-node", ()),
        ({"framework": _BRIDGE_26_04, "model": "Qwen3-235B-A22B"}, "all-to-all", ()),
        ({"framework": _BRIDGE_26_04, "model": "Mixtral"}, "all-to-all", ()),
        ({"framework": _BRIDGE_26_04, "model": "GPT-OSS-120B"}, "all-to-all", ("layernorm", "moe_act")),
        (
            {"framework": _BRIDGE_26_04, "model": "Nemotron_3_Nano", "precision": "FP8", "n_gpus": 16, "dp": 16},
            "per-node",
            ("core_attn", "layernorm", "moe_act", "moe"),
        ),
    ],
)
def test_dispatchers_and_recomputed_modules_are_known_by_recipe(
    fields: dict[str, Any], dispatch: str, modules: tuple[str, ...]
) -> None:
    """Stacks of Megatron-Core send once per node unless a recipe names all-to-all, as older ones did."""
    given: dict[str, Any] = {
        "gpu": "H100-SXM-80GB", "gpus_per_node": 8, "n_gpus": 8, "tp": 1, "dp": 8, "pp": 1, "global_batch": 16,
        "micro_batch": 1, "precision": "BF16",
    }  # fmt: skip
    if fields.get("model", "Mixtral") != "Mixtral":  # its published sizes
        given |= dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"))

    stack = express(_row(**{**given, **fields})).stack

    assert (stack.dispatch, stack.recompute_modules) == (dispatch, modules)


@pytest.mark.parametrize(
    ("fields", "hides"),
    [
        ({"source": "NVIDIA/dgxc-benchmarking v25.04.02:llama3.1/README.md", "framework": None}, True),
        ({"source": "NVIDIA/dgxc-benchmarking v25.04.02:grok1/README.md", "num_experts": 8, "topk": 2}, False),
        ({"framework": "Megatron-Bridge (26.02 NeMo Container) pretrain", "gpu": "B200"}, True),
        ({"framework": "Megatron-Bridge (26.02 NeMo Container) pretrain", "gpu": "B200", "tp": 1, "dp": 8}, False),
        ({"framework": "torchtitan compile", "notes": "async TP; seq default"}, True),
        ({"framework": "torchtitan compile"}, False),
        ({"framework": "Megatron-Core 0.8", "notes": "TP comm overlap on"}, True),
        ({"framework": "Megatron-Core 0.8", "notes": "TP comm overlap on", "sequence_parallel": False}, False),
    ],
)
def test_user_buffers_and_async_tensor_parallelism_are_known_by_recipe(fields: dict[str, Any], hides: bool) -> None:
    """Only with sequence parallelism: an all-reduce hides behind no product."""
    sizes: dict[str, Any] = {
        "gpu": "H100-SXM-80GB", "n_gpus": 8, "tp": 4, "dp": 2, "pp": 1, "global_batch": 16, "micro_batch": 1
    }  # fmt: skip

    assert express(_row(**{**sizes, **fields})).stack.hides_tp == hides


def test_layers_that_predict_further_tokens_are_part_of_the_model() -> None:
    """Megatron-Bridge trains DeepSeek-V3 with one, in the last stage, on the dispatcher of its configurations."""
    own: dict[str, Any] = {
        "framework": "Megatron-Bridge (26.02 NeMo Container) pretrain",
        "gpu": "B200",
        "gpus_per_node": 8,
    }
    case = express(_row(**{**_DEEPSEEK, **own, "pp": 16, "dp": 16, "ep": 8, "vpp": None, "precision": "MXFP8"}))

    assert isinstance(case.config, PublishedConfig)
    assert case.config.mtp == 1
    assert case.degrees.layers == (*(4,) * 15, 1)
    assert case.stack.dispatch == "per-node"


def test_adapters_are_trained_in_place_of_the_model() -> None:
    """A row that says so is predicted as `autopar predict --lora` predicts it."""
    case = express(_row(lora="rank=16,alpha=32,targets=attention", layers=1))

    found = predictor(case.family, case.config, None, case.lora)  # type: ignore[arg-type]  # frozen

    assert found.workload.lora == Lora(16, 32.0, ("attention",))


def test_seconds_follow_from_operations() -> None:
    """Qwen3-30B-A3B on 8 devices: 16 sequences of 4096 at 200 TFLOP/s each, counted by hand."""
    attention = 2048 * 128 * (2 * 32 + 2 * 4) + 32 * 128 * 4096
    per_token = 48 * (attention + 3 * 2048 * 8 * 768) + 2048 * 151936
    sizes: dict[str, Any] = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "step_time_s"))

    case = express(
        _row(model="Qwen3-30B-A3B", arch="moe", seq=4096, tflops_per_gpu=200, tflops_kind="model", global_batch=16,
             micro_batch=2, ep=8, framework="Megatron-Core", **sizes)
    )  # fmt: skip

    assert case.seconds == pytest.approx(6 * per_token * 4096 * 16 / (200e12 * 8))
    assert any("operations as Megatron-LM counts them" in note for note in case.assumptions)


def test_proxies_keep_the_layers_they_state() -> None:
    """Where all layers are alike any number of them is a proxy, else the row has to say how many have no experts."""
    sizes: dict[str, Any] = dict.fromkeys(("hidden", "heads", "kv_heads", "ffn", "vocab"))
    alike = express(_row(model="Qwen3-30B-A3B", layers=4, **sizes)).config
    told = express(_row(model="DeepSeek-V3 width", layers=4, dense_layers=1, **sizes)).config

    assert isinstance(alike, PublishedConfig)
    assert isinstance(told, PublishedConfig)
    assert (alike.num_layers, told.num_layers, told.dense_layers) == (4, 4, 1)


def test_a_named_model_is_the_published_one() -> None:
    """A row of a table often says no more than the name."""
    case = express(_row(model="Kimi K2", arch="moe-mla", layers=None, hidden=None, heads=None, kv_heads=None))

    assert isinstance(case.config, PublishedConfig)
    assert (case.family, case.config.model, case.config.experts) == ("published", "kimi-k2", 384)
    assert case.config.seq == case.row.seq
    assert "the published configuration of kimi-k2" in case.assumptions


def test_stated_mixtures_drop_no_tokens() -> None:
    """With heads as wide as the row says."""
    case = express(_row(arch="moe", num_experts=8, topk=2, moe_ffn=512, head_dim=64))

    assert isinstance(case.config, DecoderConfig)
    experts, attention = case.config.blocks[0].mlp, case.config.blocks[0].attention
    assert isinstance(experts, Experts)
    assert isinstance(attention, Attention)
    assert (experts.count, experts.top_k, experts.width, attention.size) == (8, 2, 512, 64)


def _known(case: Case) -> float:
    nics = case.cluster.inter.nics
    assert nics is not None
    return nics.count * nics.rate * 8 / 1e9


def test_links_between_nodes_are_those_of_the_row() -> None:
    """Cards and rates are read from the text; a preset stands in where there is none, and that is said."""
    stated = express(_row(n_gpus=16, dp=16, inter="4x InfiniBand HDR 200Gb/s per node"))
    total = express(_row(n_gpus=16, dp=16, inter="1600Gbps node-node RoCE"))
    silent = express(_row(n_gpus=16, dp=16, inter="RoCE RDMA"))

    assert (_known(stated), _known(total)) == (800, 1600)
    assert silent.assumptions == ("links between nodes as of preset a100",)


def test_throughput_stands_in_for_a_step_time() -> None:
    """Tokens per second and device give the seconds of a step exactly."""
    case = express(_row(step_time_s=None, tokens_per_s_per_gpu=1024.0))

    assert case.seconds == 64 * 1024 / (1024 * 8)


def test_rows_are_split_by_what_was_run() -> None:
    """Neither the id nor what was measured decides, and both sides get their share."""
    same = [_row(number, step_time_s=seconds).calibrates for number, seconds in ((1, 1.0), (2, 3.0))]
    sides = [_row(**plan).calibrates for plan in _PLANS]

    assert len(set(same)) == 1
    assert 0.25 < sum(sides) / len(sides) < 0.75


def test_recompute_that_is_not_stated_is_the_least_that_fits(cache_dir: Path) -> None:
    """It is looked for, and said to be assumed."""
    case = express(_row(recompute=None, hidden=2048, heads=16, ffn=8192, layers=24, seq=2048, micro_batch=8))

    taken, found = predict_case(case, case.stack, cache_dir)

    assert found.fits
    assert "the least recompute that fits" in case.assumptions
    assert taken.degrees.recompute != "none"


@pytest.mark.parametrize(
    "changes",
    [
        {"lora": "rank=16,alpha=32,targets=attention"},
        {"recompute": "full", "recompute_layers": 2},
        {"tp": 8, "dp": 1, "sequence_parallel": True, "hides_tp": True},
    ],
    ids=["LoRA", "first layers", "hidden"],
)
def test_rows_are_fitted_as_they_are_predicted(changes: dict[str, Any], cache_dir: Path) -> None:
    """With what a row states of adapters, recompute and its stack."""
    row = _row(**changes)
    case = express(row)
    (prepared,) = prepare([row], "megatron-a100", cache_dir)

    _, found = predict_case(case, case.stack, cache_dir)
    plain = predict_case(express(_row(tp=row.tp, dp=row.dp, sequence_parallel=True)), case.stack, cache_dir)[1]

    scalars = Stack("megatron-a100", scalars=case.stack.scalars)
    assert np.exp(prepared.log_ratio(scalars)) * case.seconds == pytest.approx(found.timeline.step_seconds)
    if not row.hides_tp:
        assert found.timeline.step_seconds != pytest.approx(plain.timeline.step_seconds, rel=0.01)


@pytest.mark.slow
def test_rows_on_slices_are_fitted_on_the_slice_of_their_size(cache_dir: Path) -> None:
    """A preset of a torus is its largest slice; 8 chips are 2 x 2 x 2 of it."""
    row = _row(framework="MaxText", gpu="TPU-v5p", dp=8, zero=3, recompute="full")
    case = express(row)
    (prepared,) = prepare([row], "maxtext-tpu", cache_dir)

    _, found = predict_case(case, case.stack, cache_dir)

    assert prepared.cluster.intra.torus == (2, 2, 2)
    assert np.exp(prepared.log_ratio(case.stack)) * case.seconds == pytest.approx(found.timeline.step_seconds)


@pytest.mark.slow
def test_rows_are_lowered_with_the_kernels_of_their_stack(cache_dir: Path) -> None:
    """Torchtitan gathers keys and values of other devices, and keeps every other product under selective recompute."""
    row = _row(framework="torchtitan compile", gpu="H100-SXM-80GB", cp=2, dp=4, zero=3, recompute="selective")
    case = express(row)
    (prepared,) = prepare([row], "fsdp-compile-h100", cache_dir)

    _, found = predict_case(case, case.stack, cache_dir)

    assert case.stack.context == "gather"
    assert case.stack.selective == "alternate"
    assert np.exp(prepared.log_ratio(case.stack)) * case.seconds == pytest.approx(found.timeline.step_seconds)


def test_versions_of_a_framework_share_scalars_and_not_kernels() -> None:
    """Torchtitan compiles its loss since 2025: rows on H200 are of that age, those on H100 older."""
    old, new = (stack_for("torchtitan compile", gpu) for gpu in ("H100 SXM 96GB", "H200-SXM-141GB"))

    assert (old.loss, new.loss) == ("eager", "fused")
    assert old.scalars == new.scalars != ()


def test_calibration_finds_a_known_stack(made: Path, cache_dir: Path) -> None:
    """Rows made by a stack give it back, and the rows held out are predicted as well as those of the fit."""
    rows = load_rows(made)
    for_fit, held_out = (
        prepare([row for row in rows if row.calibrates is side], "megatron-a100", cache_dir) for side in (True, False)
    )

    found = fit_prepared(
        for_fit, held_out, meant_stack("Megatron-LM", "A100"), ("gemm_efficiency", "memory_traffic", "step_seconds")
    )

    stack, fit = found.stack, found.stack.fit
    assert stack["gemm_efficiency"] == pytest.approx(0.8, rel=0.02)
    assert stack["memory_traffic"] == pytest.approx(1.6, rel=0.05)
    assert stack["step_seconds"] == pytest.approx(0.02, rel=0.1)
    assert found.before.mean > 0.1
    assert found.fitted.mean < 0.005
    assert found.held_out is not None
    assert found.held_out.mean < 0.005
    assert found.left_out.mean >= found.fitted.mean
    assert fit is not None
    assert fit.rows == len(for_fit) > 0
    assert {entry.name: (entry.low, entry.high) for entry in fit.valid}["hidden"] == (1024, 1024)
    assert "on a bound" not in format_calibration(found)


def test_what_rows_do_not_tell_is_that_of_the_relatives(made: Path, cache_dir: Path) -> None:
    """Rows of one node say nothing of transfers between nodes: the scalar stays at the shared fit, or its default."""
    rows = [row for row in load_rows(made) if row.source == "made" and row.n_gpus and row.n_gpus <= 8]
    prepared = prepare(rows[:3], "megatron-a100", cache_dir)
    start, names = meant_stack("Megatron-LM", "A100"), ("gemm_efficiency", "inter_slowdown")
    shared = start.with_scalars(inter_slowdown=1.7)

    alone, drawn = (fit_prepared(prepared, [], start, names, shared=other).stack for other in (None, shared))

    assert alone["inter_slowdown"] == pytest.approx(1.0, abs=0.05)
    assert drawn["inter_slowdown"] == pytest.approx(1.7, abs=0.05)


def test_scalars_on_a_bound_are_said_to_be(made: Path, cache_dir: Path) -> None:
    """A machine ten times slower than possible ends at the bounds, not beyond."""
    rows = [replace_seconds(row, 10.0) for row in load_rows(made) if row.source == "made"]
    prepared = prepare(rows[:6], "megatron-a100", cache_dir)

    found = fit_prepared(prepared, [], meant_stack("Megatron-LM", "A100"), ("gemm_efficiency", "memory_traffic"))

    assert set(found.stack.at_bounds) == {"gemm_efficiency", "memory_traffic"}
    assert "on a bound" in format_calibration(found)
    assert found.held_out is None


def replace_seconds(row: Row, factor: float) -> Row:
    """Return a row that took longer."""
    assert row.step_time_s is not None
    return msgspec.structs.replace(row, step_time_s=factor * row.step_time_s)


def test_processes_predict_what_one_does(made: Path, cache_dir: Path) -> None:
    """The same rows, whoever predicts them; what cannot be predicted is among them."""
    rows = load_rows(made)[-8:]

    alone = {outcome.row.id: outcome for outcome in predict_rows(rows, cache_dir=cache_dir)}
    together = {outcome.row.id: outcome for outcome in predict_rows(rows, cache_dir=cache_dir, workers=2)}

    assert alone == together
    assert alone["odd-1"].reason == "device 'abacus' has no preset"


def test_what_is_done_when_stopped_is_kept(made: Path, cache_dir: Path) -> None:
    """Ctrl-C ends the rows, not the report."""
    done: list[int] = []

    seen = list(
        predict_rows(
            load_rows(made),
            cache_dir=cache_dir,
            progress=lambda step: done.append(step.done),
            should_stop=lambda: len(done) == 3,
        )
    )

    assert len(seen) == 3
    assert "all" in format_validation(seen)


def _outcome(number: int, measured: float, predicted: float, **changes: Any) -> Outcome:
    return Outcome(_row(number, **changes), "", predicted, measured, "stack")


def test_scores_are_those_of_the_errors() -> None:
    """Four rows worked out by hand: errors of +10, -2, 0 and +3 %."""
    outcomes = [_outcome(i, 1.0, 1 + error) for i, error in enumerate((0.1, -0.02, 0.0, 0.03))]

    found = errors([outcome.error for outcome in outcomes])

    assert found is not None
    assert found.mean == pytest.approx(0.0375)
    assert found.median == pytest.approx(0.025)
    assert found.p90 == pytest.approx(0.1)
    assert found.near == 0.75
    assert found.bias == pytest.approx(0.0275)


def test_plans_are_ranked_within_a_model() -> None:
    """Per sample: the plan predicted best takes 1.1 s where the best takes 1 s; 2 of 3 pairs are in order.

    A plan that was measured three times counts once, and one in another precision is of another job.
    """
    outcomes = [_outcome(1, 1.0, 1.3), _outcome(2, 1.1, 1.2), _outcome(3, 2.0, 2.0), _outcome(4, 9.0, 9.0, layers=8)]
    outcomes += [_outcome(5, 0.8, 1.2), _outcome(6, 1.4, 1.2), _outcome(7, 0.5, 0.6, precision="fp8")]

    (found,) = rankings(outcomes)

    assert found.plans == 3
    assert found.tau == pytest.approx(1 / 3)
    assert found.regret == pytest.approx(0.1)


def test_memory_is_compared_in_the_unit_of_the_row() -> None:
    """Two rows of 10 GiB: 10 % too much, and 6 % too little, which is too low."""
    row = _row(memory_gb=10.0, memory_unit="GiB allocated")
    outcomes = [Outcome(row, "", 1.0, 1.0, shown_bytes=share * 10 * 2**30) for share in (1.1, 0.94)]

    found = memory_errors(outcomes)

    assert found is not None
    assert found.rows == 2
    assert found.median == pytest.approx(0.08)
    assert found.too_low == 0.5
    assert found.bias == pytest.approx(0.02)


@pytest.mark.parametrize(("kind", "shown"), [("allocated", 50), ("reserved", 56), ("device", 57.5)])
def test_memory_is_told_as_the_source_tells_it(kind: MemoryKind, shown: float) -> None:
    """Of 50 GB allocated on 80 GB the allocator holds 12 % more, and the context takes 1.5 GB."""
    assert shown_bytes(kind, 50e9, load_cluster("h100").device) == pytest.approx(shown * 1e9)


def test_rivals_are_compared_on_the_same_rows() -> None:
    """A row without a claim counts for neither side."""
    claimed = _outcome(1, 1.0, 1.05, predicted_by_source={"step_s": 0.8})
    silent = _outcome(2, 1.0, 3.0)

    (found,) = rivals([claimed, silent])

    assert (found.what, found.rows) == ("step time", 1)
    assert found.ours == pytest.approx((0.05, 0.05))
    assert found.theirs == pytest.approx((0.2, 0.2))


def test_classes_hold_every_predicted_row_once() -> None:
    """A mixture is no dense row, whatever its device; shares of posed rows count only those with stated degrees."""
    outcomes = [
        _outcome(1, 1.0, 1.1, gpu="H100"),
        _outcome(2, 1.0, 1.1, gpu="B200", precision="fp8"),
        replace(_outcome(3, 1.0, 1.1, gpu="H100"), has_experts=True),
        Outcome(_row(4, tp=None), "does not state tp"),
    ]

    found = {gate.name: known.rows for gate, known in by_class(outcomes)}

    assert found == {"mixture of experts": 1, "dense bf16 on Hopper": 1, "dense in 8 or 4 bits on Blackwell": 1}
    assert posed(outcomes) == (3, 3)


def test_the_command_reports_and_writes_pages(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables on standard output, a page and its data in the folder."""
    code = main(["validate", str(made), "--no-cache", "--source", "odd", "--source", "made", "-o", str(tmp_path)])

    printed = capsys.readouterr().out
    (page,) = tmp_path.glob("validation_*.md")
    (data,) = tmp_path.glob("validation_*.json")
    rows = json.loads(data.read_text())
    assert code == 0
    assert "device 'abacus' has no preset" in printed
    assert "device 'abacus' has no preset" in page.read_text()
    assert len(rows) == len(_PLANS) + 1
    assert {row["id"] for row in rows if row["predicted_s"] is None} == {"odd-1"}


def test_the_command_writes_a_stack(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that `--stack` reads, with where it comes from."""
    target = tmp_path / "mine.yaml"

    code = main(
        [
            "calibrate",
            str(made),
            "--stack",
            "megatron-a100",
            "--scalars",
            "gemm_efficiency",
            "--no-cache",
            "-o",
            str(target),
        ]
    )

    stack = load_stack(target)
    assert code == 0
    assert stack.fit is not None
    assert stack.fit.fitted == ("gemm_efficiency",)
    assert format_stack(stack) == target.read_text()
    assert "stack megatron-a100" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{", "train.json"),
        ('[{"id": "a-1", "layers": "many"}]', "layers"),
        ('[{"layers": 1}]', "id"),
    ],
)
def test_malformed_data_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    """The error names the file and the place."""
    if text is not None:
        (tmp_path / "train.json").write_text(text)

    with pytest.raises(DataError, match=message) as caught:
        load_rows(tmp_path)

    assert caught.value.hint


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["validate", "DATA", "--source", "nowhere"], "no row is of source 'nowhere'"),
        (["calibrate", "DATA", "--stack", "mine"], "no framework is known as stack 'mine'"),
        (["calibrate", "DATA", "--stack", "megatron-a100", "--scalars", "luck"], "there is no scalar 'luck'"),
        (["calibrate", "DATA", "--stack", "alpa-v100"], "no row to calibrate 'alpa-v100' with"),
    ],
)
def test_requests_that_cannot_be_met_are_refused(
    arguments: list[str], message: str, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one clear error and exit code 2."""
    code = main([str(made) if argument == "DATA" else argument for argument in arguments])

    assert code == 2
    assert message in capsys.readouterr().err


def test_no_stack_stands_twice() -> None:
    """A name has one choice of kernels, however many patterns lead to it."""
    kernels: dict[str, set[tuple[str, str]]] = {}
    for known in STACKS:
        kernels.setdefault(known.name, set()).add((known.attention, known.fusion))

    assert all(len(choices) == 1 for choices in kernels.values())


def test_published_rows_are_expressed_where_they_are_there() -> None:
    """Most of the published rows can be predicted, and all others have a reason."""
    folder = Path(__file__).parents[2] / "shared" / "data" / "published"
    if not folder.exists():
        pytest.skip("the published measurements are not here")
    expressed, reasons = 0, []
    for row in load_rows(folder):
        try:
            express(row)
            expressed += 1
        except InexpressibleError as why:
            reasons.append(str(why))

    assert expressed >= 0.6 * (expressed + len(reasons))
    assert all(reasons)


def test_outcomes_are_told_without_loss(cache_dir: Path) -> None:
    """What is written of a row is what was found."""
    outcome = predict_row(_row(), cache_dir)

    (told,) = to_dicts([outcome])

    assert (told["id"], told["measured_s"], told["predicted_s"]) == ("made-0001", 1.0, outcome.predicted)
    assert replace(outcome, predicted=1.0).error == 0

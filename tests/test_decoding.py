"""Steps of decoding: caches of keys and values, latent attention in its absorbed form."""

import json
from collections.abc import Mapping, Sequence
from math import fsum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import autopar
from autopar import models
from autopar.cluster import load_cluster
from autopar.configuration import Configuration
from autopar.cost import CostModel
from autopar.cost.flops import op_flops
from autopar.cost.policy import MIXED
from autopar.cost.traffic import op_bytes
from autopar.degrees import Degrees
from autopar.discover import discover
from autopar.errors import JobError, ModelError
from autopar.execute import run_graph
from autopar.formulate.block_memory import block_bytes
from autopar.formulate.building import build_tables
from autopar.ir.blocks import find_blocks
from autopar.ir.graph import Graph, Op
from autopar.models.builder import INIT_KEY
from autopar.onnx import load
from autopar.program.records import Category
from autopar.sharding import Mesh, Shard, parse_placements
from autopar.workload import open_workload
from tests.executions import TINY, Execution, random_choice, random_feeds, random_plan
from tests.gradients import as_float64

Array = NDArray[Any]
CACHED, NEW, SAMPLES = 6, 2, 4
"""Tokens in the caches, tokens of a step, samples."""
_DECODER = {"num_layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "vocab": 24}
SIZES: Mapping[str, Mapping[str, Any]] = {
    "llama3.1-8b": {**_DECODER, "ffn": 24},
    "qwen3-30b-a3b": TINY["qwen3-30b-a3b"],
    "deepseek-v3": TINY["deepseek-v3"],
    "deepseek-v2-lite": {
        "num_layers": 2, "hidden": 16, "heads": 4, "vocab": 24, "ffn": 24, "expert_ffn": 8, "experts": 4, "top_k": 2,
        "dense_layers": 1, "latent_rank": 8, "plain": 4, "rotated": 4, "value": 4,
    },
    "gpt-oss-20b": {**_DECODER, "ffn": 24, "experts": 4, "top_k": 2, "head": 8},
    "gemma2-9b": {**_DECODER, "ffn": 24, "head": 4},
}  # fmt: skip
WINDOWED = {
    "gpt2": {
        "model_type": "gpt2", "n_embd": 16, "n_head": 4, "n_layer": 2, "vocab_size": 24, "n_positions": 16,
    },
    "gemma2": {
        "model_type": "gemma2", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 24, "sliding_window": 3,
    },
    "gpt_oss": {
        "model_type": "gpt_oss", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 24, "sliding_window": 4,
        "num_local_experts": 4, "num_experts_per_tok": 2, "rope_scaling": None,
    },
    "llama4_text": {
        "model_type": "llama4_text", "hidden_size": 16, "intermediate_size": 24, "intermediate_size_mlp": 24,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 24,
        "attention_chunk_size": 4, "num_local_experts": 2, "floor_scale": 3, "attn_scale": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
}  # fmt: skip


_HYBRID = {
    "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 24,
}  # fmt: skip
SCANS = {
    "mamba2": {
        "model_type": "mamba2", "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 24, "num_heads": 4,
        "head_dim": 8, "state_size": 6, "n_groups": 2,
    },
    "jamba": {
        **_HYBRID, "model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1,
        "mamba_d_state": 6, "mamba_dt_rank": 3, "mamba_conv_bias": False,
    },
    "qwen3_next": {
        **_HYBRID, "model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"], "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "head_dim": 8,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_value_head_dim": 6, "linear_key_head_dim": 4,
    },
}  # fmt: skip


def config_file(kind: str, folder: Path) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({**WINDOWED, **SCANS}[kind]))
    return f"hf:{path}"


def model_of(source: str, **dims: int) -> Any:
    return open_workload(source, mode="infer", dims=dims).proto()


def graph_of(model: Any, samples: int = SAMPLES) -> Graph:
    return as_float64(find_blocks(load(model, batch=samples)))


def weights_of(whole: Any, step: Any) -> dict[str, Array]:
    """Return the weights of a step of decoding that are those of a model of whole sequences."""
    given, own = models.initial_values(whole, 3), models.initial_values(step, 3)
    found: dict[str, Array] = {}
    for tensor in step.graph.initializer:
        name = tensor.name
        if not any(entry.key == INIT_KEY for entry in tensor.metadata_props):
            continue
        if not name.endswith(".heads"):
            is_table = name not in given or given[name].shape != own[name].shape or "rope" in name
            found[name] = own[name] if is_table or "temperature" in name else given[name]
            continue
        flat = given[name.removesuffix(".heads") + ".T"]  # [latent, heads x size]
        heads = tensor.dims[0]
        split = flat.reshape(flat.shape[0], heads, -1)
        found[name] = split.transpose(1, 2, 0) if ".k." in name else split.transpose(1, 0, 2)
    return found


def caches_of(step: Graph, whole: Graph, values: Mapping[str, Array]) -> dict[str, Array]:
    """Return what the caches of a step hold, from all values of a model of whole sequences."""
    found = {}
    inputs = {op.name: op.inputs for op in whole.ops}
    for name in step.inputs:
        if ".cached_" not in name:
            continue
        core, _, what = name.rpartition(".cached_")
        if what == "state":
            found[name] = _state(
                step.producers()[core].kind,
                [
                    values[item][:, :CACHED]
                    if item in values and values[item].shape[:2] == (SAMPLES, CACHED + NEW)
                    else values[item]
                    for item in inputs[core]
                ],
            )
            continue
        if what == "tokens":
            kept = step.values[name].shape[1]
            found[name] = values[inputs[core][0]].transpose(0, 2, 1)[:, CACHED - kept : CACHED]
            continue
        if what == "latents":
            layer = core.removesuffix(".core")
            turned = values[f"{layer}.k.rotated"][:, 0]
            full = np.concatenate([values[f"{layer}.latent_norm"], turned], axis=-1)[:, :CACHED]
        else:
            full = values[inputs[core][{"keys": 1, "values": 2}[what]]][:, :, :CACHED]
        kept = step.values[name].shape[-2]
        found[name] = full[..., CACHED - kept :, :]
    return found


def _state(kind: str, inputs: Sequence[Array]) -> Array:
    """Return the state of a scan behind all tokens of its inputs, token by token by the recurrence of its paper."""
    match kind:
        case "autopar::CachedStateSpaceScan":
            x, dt, a_log, b, _, _, dt_bias = inputs
            b = b.repeat(x.shape[2] // b.shape[2], axis=2)
            step = np.logaddexp(0, dt + dt_bias)
            state = np.zeros((*x[:, 0].shape, b.shape[3]))
            for t in range(x.shape[1]):
                added = (step[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
                state = np.exp(-step[:, t] * np.exp(a_log))[..., None, None] * state + added
        case "autopar::CachedSelectiveScan":
            x, dt, a_log, b, _, _, dt_bias = inputs
            step = np.logaddexp(0, dt + dt_bias)
            state = np.zeros((len(x), *a_log.shape))
            for t in range(x.shape[1]):
                added = (step[:, t] * x[:, t])[..., None] * b[:, t, None]
                state = np.exp(-step[:, t, :, None] * np.exp(a_log)) * state + added
        case "autopar::CachedGatedDeltaRule":
            _, k, v, a, b, a_log, dt_bias = inputs
            k = (k / np.sqrt(np.square(k).sum(-1, keepdims=True) + 1e-6)).repeat(v.shape[2] // k.shape[2], axis=2)
            state = np.zeros((*v[:, 0].shape[:2], k.shape[3], v.shape[3]))
            for t in range(v.shape[1]):
                decay = np.exp(-np.exp(a_log) * np.logaddexp(0, a[:, t] + dt_bias))
                state = decay[..., None, None] * state
                error = v[:, t] - np.einsum("bhk,bhkv->bhv", k[:, t], state)
                state = state + np.einsum("bhk,bhv->bhkv", k[:, t], error / (1 + np.exp(-b[:, t]))[..., None])
        case _:
            raise AssertionError(f"{kind} has no state")
    return state


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if "deepseek" in name else pytest.mark.slow) for name in SIZES]
)
def test_a_step_of_zoo_models_continues_the_sequence(name: str) -> None:
    """The logits of a step behind caches are those of the last tokens of the whole sequence."""
    sizes = {key: value for key, value in SIZES[name].items() if key != "seq"}
    _check_continues(f"zoo:{name}", sizes)


@pytest.mark.parametrize("kind", WINDOWED)
def test_a_step_behind_windows_and_chunks_continues_the_sequence(kind: str, tmp_path: Path) -> None:
    """Also where a layer keeps only the tokens that can be seen, and where positions are learned or scores grow."""
    _check_continues(config_file(kind, tmp_path), {})


@pytest.mark.parametrize("kind", SCANS)
def test_a_step_of_scans_goes_on_from_their_states(kind: str, tmp_path: Path) -> None:
    """States of Mamba, Mamba 2 and the delta rule, the tokens before convolutions, and caches of attention between."""
    _check_continues(config_file(kind, tmp_path), {})


def _check_continues(source: str, sizes: Mapping[str, int]) -> None:
    whole = model_of(source, seq=CACHED + NEW, **sizes)
    step = model_of(source, seq=NEW, cached=CACHED, **sizes)
    long, short = graph_of(whole), graph_of(step)
    tokens = np.random.default_rng(1).integers(0, 24, (SAMPLES, CACHED + NEW))
    start = {name: array.astype(np.float64) for name, array in models.initial_values(whole, 3).items()}
    values = run_graph(long, {"input_ids": tokens, **start})
    own = {name: array.astype(np.float64) for name, array in weights_of(whole, step).items()}

    found = run_graph(short, {"input_ids": tokens[:, CACHED:], **own, **caches_of(short, long, values)})

    # The factor of scores is an attribute in float32, whose root the reference of the standard's op takes.
    np.testing.assert_allclose(found["logits"], values["logits"][:, CACHED:], atol=1e-6, rtol=1e-6)


def test_caches_of_windows_hold_what_can_be_seen(tmp_path: Path) -> None:
    graph = graph_of(model_of(config_file("gemma2", tmp_path), cached=100))

    lengths = [graph.values[name].shape[2] for name in graph.inputs if name.endswith(".cached_keys")]

    assert lengths == [2, 100]  # a window of 3 tokens, and all
    assert graph.values["input_ids"].shape == (SAMPLES, 1)


@pytest.mark.parametrize(
    "name",
    [
        "deepseek-v3",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama3.1-8b", "mamba2-2.7b", "qwen3-next-80b-a3b")),
    ],
)
def test_plans_of_a_step_compute_what_the_model_computes(name: str, cache_dir: Path) -> None:
    """The law, for random plans, of stages too."""
    model = models.build(name, **{**{**TINY, **SIZES}[name], "seq": 1, "cached": CACHED})
    graph = graph_of(model)
    start = {name: array.astype(np.float64) for name, array in models.initial_values(model).items()}
    data, states = random_feeds(graph, 2, start)
    execution = Execution.of_graph(graph, data, states)
    rules = discover(graph_of(model, 10), cache_dir=cache_dir)

    for seed, configuration in enumerate(
        (
            Configuration(1, Mesh.of(inner=2), 2, "forward-only"),
            Configuration(2, Mesh.of(outer=2, inner=2), 2, "forward-only"),
        )
    ):
        execution.check(random_plan(execution.folded, rules, configuration, SAMPLES, seed, train=False))


def test_heads_of_latent_attention_are_split_and_caches_copied(cache_dir: Path) -> None:
    """Megatron's tensor parallelism splits heads; every device then holds the latent vectors of all tokens."""
    found = autopar.predict(
        "zoo:deepseek-v3", Degrees(tp=2, dp=2, microbatch=2, global_batch=8), mode="infer", stack="ideal",
        dims={**SIZES["deepseek-v3"], "seq": 1, "cached": CACHED}, cache_dir=cache_dir,
    )  # fmt: skip

    cores = [op for block in found.plan.blocks for op in block.ops if op.op.endswith(".core.latent")]
    assert cores
    for core in cores:
        q, cache, latent = (parse_placements(text) for text in core.inputs)
        assert q == (Shard(0), Shard(1))
        assert cache == latent
        assert cache[0] == Shard(0)
    assert found.plan.simulated is not None
    (memory,) = found.plan.simulated.stages
    # 8 samples on 2 data-parallel devices, 6 tokens of 8 latent and 4 rotated numbers, of 2 bytes, in 3 layers.
    assert memory.breakdown[Category.CACHES] == 8 / 2 * CACHED * (8 + 4) * 2 * 3


def test_states_of_scans_are_split_by_heads(cache_dir: Path) -> None:
    """And counted like caches, however many tokens were before: by hand."""
    found = autopar.predict(
        "zoo:mamba2-2.7b", Degrees(tp=2, dp=2, microbatch=2, global_batch=8), mode="infer", stack="ideal",
        dims={**TINY["mamba2-2.7b"], "seq": 1, "cached": 1000}, cache_dir=cache_dir,
    )  # fmt: skip

    # 8 heads of 4 channels by 4 numbers of state, and 3 tokens of these channels and of b and c of 4 groups.
    of_sample = 2 * (8 * 4 * 4 + 3 * (8 * 4 + 2 * 4 * 4))
    assert found.plan.simulated is not None
    (memory,) = found.plan.simulated.stages
    assert memory.breakdown[Category.CACHES] == 8 * of_sample * 2 / 4  # of 2 bytes, on 2 x 2 devices


@pytest.mark.parametrize("shape", [(1,), (2,)])
def test_tables_and_programs_count_the_same_caches(shape: tuple[int, ...], cache_dir: Path) -> None:
    """The linear estimate of the placement problem has the bytes of the caches of all microbatches."""
    workload = open_workload("zoo:llama3.1-8b", mode="infer", dims={**SIZES["llama3.1-8b"], "seq": 1, "cached": CACHED})
    rules = workload.rules(cache_dir=cache_dir)
    one, four = workload.folded(4), workload.folded(4, 4)
    mesh, costs = Mesh.of(inner=shape[0]), CostModel(load_cluster("h100"), MIXED)

    tables = [build_tables(folded, rules, mesh, costs) for folded in (one, four)]

    choice = random_choice(tables[0], np.random.default_rng(0))
    resident = [fsum(block_bytes(each, choice).resident) for each in tables]
    whole = 2 * 4 * 2 * CACHED * 4 * 2  # keys and values of 4 samples, 2 heads of 4 numbers, of 2 bytes
    assert whole / shape[0] <= (resident[1] - resident[0]) / 3 <= whole


def test_a_latent_cache_is_read_once_for_all_heads() -> None:
    """By hand: 128 heads of 576 numbers over 4097 tokens of 64 samples."""
    op = Op("a", "autopar::CachedLatentAttention", ("q", "c", "l"), ("y",), (("rank", 512), ("scale", 0.1)))
    inputs = [np.array([[64, 128, 1, 576]]), np.array([[64, 4096, 576]]), np.array([[64, 1, 576]])]
    outputs = [np.array([[64, 128, 1, 512]])]

    flops = op_flops(op, inputs, outputs)[0]
    moved = op_bytes(op, inputs, outputs, dict.fromkeys("qcly", 2.0))[0]

    assert flops == 2 * 64 * 128 * (576 + 512) * 4096.5
    # The cache once, the token's own vector read and written behind it, queries and results.
    assert moved == 2 * 64 * (4096 * 576 + 2 * 576 + 128 * 576 + 128 * 512)


def test_caches_are_not_split_by_tokens() -> None:
    """What is missing is said, and what does split them."""
    sizes = {**SIZES["llama3.1-8b"], "seq": 1, "cached": CACHED}

    with pytest.raises(JobError, match="cp 2 would split the caches of a step of decoding by tokens") as error:
        autopar.predict("zoo:llama3.1-8b", Degrees(cp=2, microbatch=2, global_batch=4), mode="infer", dims=sizes)

    assert "tp splits caches by heads" in str(error.value.hint)


def test_steps_are_not_trained() -> None:
    workload = open_workload("zoo:llama3.1-8b", dims={**SIZES["llama3.1-8b"], "seq": 1, "cached": CACHED})

    with pytest.raises(JobError, match=r"is a step of decoding, which reads the cache"):
        workload.folded(2)


@pytest.mark.parametrize(
    ("name", "dims", "message"),
    [
        ("bloom-176b", {}, "steps of decoding of a model with scores that fall with distance are not known"),
        ("deepseek-v3", {"mtp": 1}, "steps of decoding of a model with multi-token prediction are not known"),
        ("llama3.1-8b", {"docs_per_sequence": 2}, "2 documents per sequence behind a cache of one"),
        ("t5-11b", {}, "t5-11b has no packed sequences, no experts, no multi-token prediction and no caches"),
    ],
)
def test_what_has_no_step_is_refused(name: str, dims: Mapping[str, int], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        models.build(name, cached=16, **dims)


def test_a_plan_holds_the_caches_of_all_microbatches(cache_dir: Path) -> None:
    """Whatever the number of microbatches, a plan on two devices has half of all caches on each."""
    plan = autopar.solve(
        "zoo:llama3.1-8b", gpus=2, mode="infer", global_batch=8, stack="ideal", cache_dir=cache_dir, time_limit=30,
        dims={**SIZES["llama3.1-8b"], "seq": 1, "cached": 512},
    )  # fmt: skip

    total = 8 * 2 * 2 * 2 * 512 * 4 * 2  # samples, layers, keys and values, heads, tokens, numbers, bytes
    assert plan.simulated is not None
    assert all(memory.breakdown[Category.CACHES] == total / 2 for memory in plan.simulated.stages)

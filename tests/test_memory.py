"""Memory per stage in exact numbers: cases in which other estimators were wrong, and published formulas."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autopar
from autopar.cluster import load_cluster
from autopar.cost import FSDP, MEGATRON_FP16, MIXED, DtypePolicy, Resharder, Stack
from autopar.degrees import Degrees
from autopar.errors import InfeasibleError
from autopar.folding.fold import fold
from autopar.folding.selective_recompute import selective_ops
from autopar.formulate.step_time import Pipeline
from autopar.ir.blocks import find_blocks
from autopar.models import layers
from autopar.models.builder import Builder
from autopar.onnx import load
from autopar.plan import StagePlan
from autopar.prediction import Prediction, Predictor
from autopar.program.lower import lower, lower_blocks
from autopar.program.records import Category, Collective, SegmentPhase
from autopar.recompute import ON_DEVICE, Recompute, format_recompute
from autopar.simulate import simulate
from autopar.simulate.blocks import BlockMemories
from autopar.simulate.ranges import chain_bytes
from autopar.training import training_step
from autopar.workload import open_workload
from tests.executions import COSTS, model_graph, model_rules, random_plan
from tests.test_runtime import SPACE

A100 = load_cluster("a100")
UNFUSED = Stack("unfused", attention="unfused")
NONE, SELECTIVE, FULL = ON_DEVICE

SMALL = {"num_layers": 8, "hidden": 16, "heads": 4, "seq": 8, "vocab": 32}
LAYER = 12 * 16**2 + 13 * 16  # parameters of a layer of it, biases included
EMBEDDING, POSITIONS, NORM = 32 * 16, 8 * 16, 2 * 16
WIDE = {"num_layers": 4, "hidden": 2048, "heads": 16, "seq": 1024, "vocab": 51200}


@cache
def predictor(name: str, cache_dir: Path, **dims: Any) -> Predictor:
    """Return a model, opened once."""
    mode = dims.pop("mode", "train")
    return Predictor(open_workload(f"zoo:{name}", mode=mode, dims=dims), cache_dir)


def bytes_of(found: Prediction, category: Category) -> list[float]:
    """Return the bytes of a category by stage."""
    return [dict(stage.memory.breakdown)[category] for stage in found.timeline.stages]


def test_uneven_stages_are_counted_layer_by_layer(cache_dir: Path) -> None:
    """Eight layers on stages of 1, 2, 2 and 3; an estimator that averaged them was 31.8 % too low.

    See https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5077. The first stage has the embeddings, the last one the
    final norm and a copy of the token embedding, which the head is tied to, with its gradient and optimizer's state.
    """
    degrees = Degrees(pp=4, microbatch=2, global_batch=8, layers=(1, 2, 2, 3))

    found = predictor("gpt2", cache_dir, **SMALL).predict(degrees, A100)

    owned = [LAYER + EMBEDDING + POSITIONS, 2 * LAYER, 2 * LAYER, 3 * LAYER + NORM + EMBEDDING]
    assert bytes_of(found, Category.PARAMETERS) == [2 * count for count in owned]
    assert bytes_of(found, Category.GRADIENTS) == [4 * count for count in owned]
    assert bytes_of(found, Category.OPTIMIZER) == [12 * count for count in owned]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_stage_holds_the_microbatches_in_flight(schedule: str, cache_dir: Path) -> None:
    """1F1B holds p - s microbatches on stage s, GPipe all of them; see https://github.com/alpa-projects/alpa/issues/684.

    The middle stages have two equal layers each and keep the same per microbatch; the fullest moment of both is the
    same one of the running microbatch. The optimizer is there all the time.
    """
    model = predictor("gpt2", cache_dir, **SMALL)
    found = [
        model.predict(Degrees(pp=4, microbatch=2, global_batch=2 * count, schedule=schedule, layers=(1, 2, 2, 3)), A100)
        for count in (6, 8)
    ]

    stage = found[0].program.stages[1]
    blocks = BlockMemories(found[0].program.table(), True).walk(stage.blocks, stage.recompute)
    kept = sum(block.kept for block in blocks)
    six, eight = (bytes_of(one, Category.ACTIVATIONS) for one in found)
    assert six[1] - six[2] == (kept if schedule == "1f1b" else 0.0)
    assert eight[1] - six[1] == (0.0 if schedule == "1f1b" else 2 * kept)
    assert min(bytes_of(found[0], Category.OPTIMIZER)) > 0


MOE = {"hidden": 64, "heads": 8, "kv_heads": 8, "ffn": 96, "seq": 16, "vocab": 64, "experts": 4, "num_layers": 4}
EXPERTS = 4 * 4 * 3 * 64 * 96  # layers x experts x matrices
ATTENTION = 4 * 4 * 64 * 64
REPLICATED = 4 * (64 * 4 + 2 * 64) + 64  # routers, norms


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_experts_are_divided_by_expert_degree(mode: str, cache_dir: Path) -> None:
    """Experts are divided by the expert degree, everything else is copied over it.

    Others divided all by the tensor degree (https://github.com/NVIDIA/Megatron-LM/issues/4050), or experts by nothing
    (https://github.com/ai-dynamo/aiconfigurator/pull/1390), and state of the optimizer by the wrong devices.
    """
    model = predictor("mixtral-8x7b", cache_dir, mode=mode, **MOE)
    schedule = "1f1b" if mode == "train" else "forward-only"

    found = model.predict(Degrees(dp=4, ep=2, microbatch=4, global_batch=16, schedule=schedule), A100)

    embeddings = 2 * 64 * 64
    rest = ATTENTION + REPLICATED + embeddings
    assert bytes_of(found, Category.PARAMETERS) == [2 * (EXPERTS / 2 + rest)]
    if mode == "train":
        assert bytes_of(found, Category.OPTIMIZER) == [12 * (EXPERTS / 2 + rest)]


@pytest.mark.parametrize(
    ("policy", "zero", "expected"),
    [
        (MIXED, 0, 18.0),
        (MIXED, 1, 6 + 12 / 4),
        (MEGATRON_FP16, 0, 20.0),
        (MEGATRON_FP16, 1, 4 + 16 / 4),
        (FSDP, 3, 4.0),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_bytes_per_parameter(policy: DtypePolicy, zero: int, expected: float, cache_dir: Path) -> None:
    """On d = 4 devices: Megatron's 18, 20, 6 + 12/d and 4 + 16/d with the distributed optimizer, FSDP's 16/d.

    Of the 20 and the 16/d, 4 are the gradient in float32, which is there in the update alone.
    """
    model = predictor("mlp-xs", cache_dir, num_layers=4, hidden=256)

    found = model.predict(Degrees(dp=4, zero=zero, microbatch=8, global_batch=32), A100, policy=policy)

    resident = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER)
    passing = policy.master_gradient / (4 if zero else 1)
    assert sum(bytes_of(found, category)[0] for category in resident) == (expected - passing) * 4 * 256 * 256
    stage = found.program.stages[0]
    assert sum(part.bytes for part in stage.resident) == expected * 4 * 256 * 256


def test_fsdp_gathers_two_blocks_at_a_time(cache_dir: Path) -> None:
    """The block that runs and the next one, whole and in bfloat16; a block is one layer of 256 x 256."""
    model = predictor("mlp-xs", cache_dir, num_layers=4, hidden=256)

    found = model.predict(Degrees(dp=4, zero=3, microbatch=8, global_batch=32), A100, policy=FSDP)

    assert bytes_of(found, Category.GATHERED) == [2 * 2 * 256 * 256]


def test_limits_are_in_the_unit_of_needs() -> None:
    """A model that needs 18 bytes for each of 2,097,152 parameters fits a little more than that, and no less.

    An early exit that compared other units never fired (nnScaler's `pre_estimate_mem`).
    """
    need = 18 * 8 * 512 * 512

    with pytest.raises(InfeasibleError, match=r"needs .* MB .* more than the limit of 37\.5 MB"):
        autopar.solve("zoo:mlp-xs", gpus=1, cluster="h100", global_batch=8, memory_limit=need - 0.25e6)

    assert autopar.solve("zoo:mlp-xs", gpus=1, cluster="h100", global_batch=8, memory_limit=need + 6e6).simulated


@pytest.mark.parametrize(
    "stack", [Stack("fused"), UNFUSED, replace(UNFUSED, name="masks", dropout="layers")], ids=lambda stack: stack.name
)
@pytest.mark.parametrize(("tp", "sequence"), [(1, False), (2, False), (2, True)])
def test_a_gpt_layer_keeps_what_korthikanti_counts(tp: int, sequence: bool, stack: Stack, cache_dir: Path) -> None:
    """A layer keeps sbh (10 + 24 / t + 5 as / (h t)) bytes (Korthikanti et al., 2022, arXiv:2205.05198, equation 2).

    With sequence parallelism all of it is divided by t (equation 4). Of these, 2 sbh are masks of two dropouts, which
    are there if the stack has them. Fused attention keeps 4 bytes per row of scores in place of 5 per score.
    """
    hidden, heads, seq, samples = (WIDE["hidden"], WIDE["heads"], WIDE["seq"], 4)
    program, _ = predictor("gpt2", cache_dir, **WIDE).lowered(
        Degrees(tp=tp, sequence_parallel=sequence, microbatch=samples, global_batch=samples), A100, stack
    )

    blocks = BlockMemories(program.table(), True).walk(program.stages[0].blocks, program.stages[0].recompute)
    kept = [block.kept for block in blocks][2] / (seq * samples * hidden)

    scores = 5 * heads * seq / hidden if stack.attention == "unfused" else 4 * heads / hidden
    masks = 0 if stack.dropout == "layers" else 2
    assert kept == (10 - masks) / (tp if sequence else 1) + (24 + scores) / tp


def test_selective_recompute_drops_the_scores_of_unfused_attention(cache_dir: Path) -> None:
    """As Megatron-LM does, and norms and the activation function besides; fused attention has no scores to drop.

    Per layer of b samples sbh 18 bytes remain: what comes in, q, k, v, the sum after attention, and the input of the
    activation function: 2 + 6 + 2 + 8. With fused attention its result (2) and the sums of its rows stay.
    """
    model = predictor("gpt2", cache_dir, **WIDE)
    kept, seconds = {}, {}
    for stack in (Stack("fused"), UNFUSED):
        for flavour in ON_DEVICE:
            degrees = Degrees(microbatch=4, global_batch=4, recompute=str(flavour))
            found = model.predict(degrees, A100, stack)
            stage = found.program.stages[0]
            block = list(BlockMemories(found.program.table(), True).walk(stage.blocks, stage.recompute))[2]
            kept[stack.name, flavour] = block.kept / (4 * WIDE["seq"] * WIDE["hidden"])
            seconds[stack.name, flavour] = found.timeline.step_seconds

    assert kept["unfused", SELECTIVE] == 18
    assert kept["fused", SELECTIVE] == 20 + 4 * WIDE["heads"] / WIDE["hidden"]
    for name in ("fused", "unfused"):
        assert seconds[name, NONE] < seconds[name, SELECTIVE] < seconds[name, FULL]
        assert seconds[name, SELECTIVE] - seconds[name, NONE] < 0.4 * (seconds[name, FULL] - seconds[name, NONE])


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_above_the_number_of_key_heads_tensor_parallelism_copies_keys_and_values_only(
    sequence_parallel: bool, cache_dir: Path
) -> None:
    """4 devices, 4 query heads, 2 key heads: of a layer's matrices those of 64 x 32 for keys and values are whole.

    All others are divided by 4. Nothing is communicated that is not where there are 4 key heads, too, but the gradients
    of what is whole, once per step.
    """
    dims = {"num_layers": 8, "hidden": 64, "heads": 4, "ffn": 96, "seq": 16, "vocab": 128}
    degrees = Degrees(tp=4, sequence_parallel=sequence_parallel, microbatch=2, global_batch=4)
    collectives = {}
    for key_heads in (2, 4):
        model = predictor("llama3-8b", cache_dir, kv_heads=key_heads, **dims)
        program, _ = model.lowered(degrees, A100, Stack("fused"))
        collectives[key_heads] = [
            (segment.phase, sum(isinstance(instruction, Collective) for instruction in segment.instructions))
            for segment in program.segments
            if segment.phase in (SegmentPhase.FORWARD, SegmentPhase.BACKWARD)
        ]
        found = model.predict(degrees, A100)
        layer = (2 * 64 * 64 + 3 * 64 * 96) / 4 + 2 * 64 * 16 * key_heads / (4 if key_heads == 4 else 1) + 2 * 64
        assert bytes_of(found, Category.PARAMETERS) == [2 * (8 * layer + 2 * 64 * 128 / 4 + 64)]
    assert collectives[2] == collectives[4]


@pytest.mark.parametrize(
    ("hidden", "heads", "seq", "left"), [(256, 4, 1024, 22), (2048, 32, 2048, 18), (1024, 4, 4096, 18)]
)
def test_selective_recompute_drops_scores_of_any_width(
    hidden: int, heads: int, seq: int, left: int, cache_dir: Path
) -> None:
    """Of 5 bytes per score none remain, however much scores dominate; nor norms (4) of wide layers and the GELU (8).

    A layer without dropout keeps 32 sbh + 5 as^2b (Korthikanti et al., 2022). At (2048, 32, 2048) scores are 5 x 32 x
    2048 / 2048 = 160 of the 192 bytes: dropping anything frees about as much per second as full recompute does.
    """
    model = predictor("gpt2", cache_dir, num_layers=4, hidden=hidden, heads=heads, seq=seq, vocab=51200)
    kept = {}
    for flavour in (NONE, SELECTIVE):
        program, _ = model.lowered(Degrees(microbatch=2, global_batch=2, recompute=str(flavour)), A100, UNFUSED)
        stage = program.stages[0]
        block = list(BlockMemories(program.table(), True).walk(stage.blocks, stage.recompute))[2]
        kept[flavour] = block.kept / (2 * seq * hidden)

    assert kept == {NONE: 32 + 5 * heads * seq / hidden, SELECTIVE: left}


def test_selective_recompute_by_torchtitan_keeps_attention_and_every_other_product(cache_dir: Path) -> None:
    """Of a layer of Llama: its input, rotated queries (wq), values (wv), attention and its sums, the gate (w1).

    The second, fourth and sixth product (keys, output, up) run again, with norms, rotations and the activation.
    """
    hidden, heads, key_heads, ffn, seq = 256, 4, 2, 640, 512
    model = predictor(
        "llama3-8b",
        cache_dir,
        num_layers=4,
        hidden=hidden,
        heads=heads,
        kv_heads=key_heads,
        ffn=ffn,
        seq=seq,
        vocab=512,
    )
    stack = Stack("titan", selective="alternate")

    program, _ = model.lowered(Degrees(microbatch=2, global_batch=2, recompute="selective"), A100, stack)

    stage = program.stages[0]
    block = list(BlockMemories(program.table(), True).walk(stage.blocks, stage.recompute))[2]
    keys = hidden * key_heads // heads
    assert block.kept / (2 * seq) == 2 * (3 * hidden + keys + ffn) + 4 * heads


def test_selective_recompute_drops_the_scores_of_attention_written_as_single_ops() -> None:
    """Softmax between two products of activations: its result is dropped, at any cost of recomputing it.

    A softmax over a product with parameters, as of a router, is none of these.
    """
    g = Builder("scores")
    width, length = 16, 1024
    y = g.input("x", ("batch", length, width))
    for layer in range(3):
        q, k, v = (layers.linear(g, y, f"{layer}.{part}", width, width, bias=False) for part in "qkv")
        turned = g.op("Transpose", k, name=f"{layer}.turned", perm=(0, 2, 1))
        product = g.op("MatMul", q, turned, name=f"{layer}.product")
        scaled = g.op("Mul", product, g.parameter(f"{layer}.scale", (1,)), name=f"{layer}.scaled")
        mixed = g.op(
            "MatMul", g.op("Softmax", scaled, name=f"{layer}.probabilities", axis=-1), v, name=f"{layer}.mixed"
        )
        routed = g.op("Softmax", layers.linear(g, mixed, f"{layer}.router", width, width), name=f"{layer}.y", axis=-1)
        y = g.op("Add", routed, y, name=f"{layer}.sum")
    folded = fold(training_step(find_blocks(load(g.model({y: ("batch", length, width)}), batch=2)), loss="mse"))

    again = {
        kind.ops[position].name.partition(".")[2]
        for kind, positions in zip(folded.kinds, selective_ops(folded, COSTS), strict=True)
        for position in positions
    }

    assert {"product", "scaled", "probabilities"} <= again


@pytest.mark.parametrize("name", ["gpt2", "mlp-xs"])
@pytest.mark.parametrize("number", [2, 3, 4])
def test_the_planner_counts_the_bytes_of_the_simulator(name: str, number: int, cache_dir: Path) -> None:
    """Random plans with any recompute: planner and simulator count memory alike, so that plans found also fit.

    The planner takes the largest gathers and reductions of a stage to be there with its fullest moment; the simulator
    knows which blocks run beside each other.
    """
    configuration = SPACE[number]
    folded = fold(model_graph(name, 4))
    plan = random_plan(folded, model_rules(name, cache_dir), configuration, 4, seed=number)
    lowered = lower_blocks(plan.blocks, folded, Resharder(plan.device_mesh, COSTS))
    pipeline = Pipeline(configuration.num_stages, configuration.num_microbatches, configuration.schedule)
    ranges = chain_bytes(lowered, folded, trains=True)

    rng = np.random.default_rng(number)
    for flavour in (*ON_DEVICE, None):
        stages = tuple(replace(stage, recompute=_recompute(stage, flavour, rng)) for stage in plan.stages)
        timeline = simulate(lower(replace(plan, stages=stages), folded, COSTS), COSTS)
        for index, (stage, found) in enumerate(zip(stages, timeline.stages, strict=True)):
            in_flight, away = pipeline.in_flight(index), stage.hosted
            peak = ranges.peak(*stage.blocks, in_flight, stage.flavours, away=away)
            hosted = ranges.host_bytes(*stage.blocks, in_flight, stage.flavours, away=away)
            beside = ranges.communication_bytes(*stage.blocks, stage.flavours)
            assert peak - beside <= found.memory.bytes * (1 + 1e-12)
            assert found.memory.bytes <= peak * (1 + 1e-12)
            assert found.host_bytes == pytest.approx(hosted, rel=1e-12)


def _recompute(stage: StagePlan, flavour: Recompute | None, rng: np.random.Generator) -> str:
    """Return a flavour for all blocks of a stage, or any for each."""
    if flavour is not None:
        return str(flavour)
    numbers = rng.integers(0, len(ON_DEVICE), stage.blocks[1] - stage.blocks[0])
    return format_recompute(tuple(ON_DEVICE[number] for number in numbers))

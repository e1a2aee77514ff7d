"""Plans of tiny models, random or solved, to be executed and held against the unpartitioned model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar import models, solvers
from autopar.bounds.roofline import roofline
from autopar.cluster import PRESETS, Cluster, Link
from autopar.configuration import Configuration
from autopar.cost import CostModel
from autopar.discover import Rules, discover
from autopar.errors import ProgramError
from autopar.execute import Executor, run_graph
from autopar.folding.fold import Folded, fold
from autopar.folding.selective_recompute import is_forward
from autopar.formulate.constraints import FREE, Constraints
from autopar.formulate.step_time import Split, StepTime
from autopar.formulate.tables import Tables
from autopar.ir.blocks import find_blocks
from autopar.ir.graph import Graph, Role
from autopar.ir.relays import with_relays
from autopar.onnx import load
from autopar.plan import BlockPlan, Job, ModelInfo, Plan
from autopar.problem import Choice, Problem
from autopar.program.lower import lower
from autopar.program.records import Program
from autopar.program.verify import verify_program
from autopar.progress import never, silent
from autopar.recompute import ON_DEVICE, Recompute, format_hosted, format_recompute
from autopar.runtime import StepResult, run_step
from autopar.schedule import SCHEDULES
from autopar.search.branch_and_bound import search as run_search
from autopar.search.candidate import Candidate
from autopar.search.candidate_plan import assemble
from autopar.search.context import SearchContext
from autopar.search.settings import SearchSettings
from autopar.shares import mean_microbatches
from autopar.training import LOSS_SCALE, STEP, training_step
from tests.gradients import as_float64

Array = NDArray[Any]

TINY: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"num_layers": 3, "hidden": 16, "heads": 4, "seq": 4, "vocab": 24},
    "llama3-8b": {"num_layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "seq": 4, "vocab": 24},
    "bert-base": {"num_layers": 2, "hidden": 16, "heads": 4, "seq": 4, "vocab": 24},
    "vit-b16": {"num_layers": 2, "hidden": 16, "heads": 4, "patch": 4, "image_size": 8, "classes": 8},
    "mixtral-8x7b": {
        "num_layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "seq": 4, "vocab": 24, "experts": 4,
    },
    "resnet50": {"blocks": (1, 2), "channels": 4, "image_size": 32, "classes": 8},
    "deepseek-moe-16b": {
        "num_layers": 3, "hidden": 16, "heads": 4, "kv_heads": 4, "dense_ffn": 40, "ffn": 8, "seq": 4, "vocab": 24,
        "experts": 8, "top_k": 2,
    },
    "qwen3-30b-a3b": {
        "num_layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "head": 4, "seq": 4, "vocab": 24, "experts": 4,
        "top_k": 2, "expert_ffn": 8,
    },
    "deepseek-v3": {
        "num_layers": 3, "hidden": 16, "heads": 4, "seq": 4, "vocab": 24, "ffn": 24, "expert_ffn": 8, "experts": 8,
        "top_k": 2, "groups": 4, "chosen_groups": 2, "dense_layers": 1, "query_rank": 8, "latent_rank": 8, "plain": 4,
        "rotated": 4, "value": 4,
    },
    "mamba2-2.7b": {
        "num_layers": 2, "hidden": 16, "seq": 4, "vocab": 24, "scan_heads": 8, "head": 4, "scan_groups": 4, "state": 4,
    },
    "mamba-2.8b": {"num_layers": 2, "hidden": 16, "seq": 4, "vocab": 24, "state": 4},
    "jamba-v0.1": {
        "num_layers": 8, "hidden": 16, "heads": 4, "kv_heads": 4, "ffn": 24, "seq": 4, "vocab": 24, "experts": 4,
        "top_k": 2, "state": 4,
    },
    "nemotron-h-8b": {
        "num_layers": 8, "hidden": 16, "heads": 4, "kv_heads": 4, "head": 4, "ffn": 24, "seq": 4, "vocab": 24,
        "scan_heads": 4, "scan_head": 4, "scan_groups": 4, "state": 4,
    },
    "qwen3-next-80b-a3b": {
        "num_layers": 4, "hidden": 16, "heads": 4, "kv_heads": 4, "head": 8, "ffn": 24, "seq": 4, "vocab": 24,
        "experts": 4, "top_k": 2, "expert_ffn": 8, "shared_ffn": 8, "scan_heads": 8, "scan_head": 4, "scan_groups": 4,
        "state": 4,
    },
    "t5-11b": {"num_layers": 2, "hidden": 16, "heads": 4, "head": 4, "seq": 4, "vocab": 24, "ffn": 24},
    "unet-sd1": {
        "channels": 8, "factors": (1, 2), "blocks": 1, "heads": 4, "context": 8, "tokens": 4, "image_size": 8,
        "groups": 4,
    },
    "mlp-xs": {"num_layers": 4, "hidden": 16},
}  # fmt: skip
"""One small model of every family, whose sizes are multiples of 4 (heads, experts) and mostly of 8."""

EXECUTOR = Executor()
TOLERANCE = 1e-9
"""Relative to the largest element of a tensor: in float64 a sum in another order differs by about 1e-16 per term, and
models as small as these amplify it by less than a thousand."""
TOLERANCE_FLOAT32 = 1e-3
"""The same in float32, where a term of a sum brings 1e-7; the largest deviation of the tiny models is 2e-4."""
SMALLEST = 1e-4
"""Tensors whose elements are all smaller are held to it: what should cancel leaves the rounding of its terms."""


def _slow_cluster() -> Cluster:
    """Return a cluster of devices so slow that even tiny models are worth splitting, and without tiles to fill."""
    h100 = PRESETS["h100"]
    device = replace(
        h100.device,
        peaks=tuple((name, peak / 1e6) for name, peak in h100.device.peaks),
        memory_bandwidth=3e6,
        launch=1e-9,
        num_sms=0,
    )
    link = Link("slow", 1e8, 1e-7)
    return replace(h100, device=device, intra=link, inter=link)


COSTS = CostModel(_slow_cluster())
QUICK_MEMORY = replace(
    COSTS, cluster=replace(COSTS.cluster, device=replace(COSTS.cluster.device, memory_bandwidth=3e9))
)
"""The same with memory that is faster than the links, as it is on real clusters: collectives are what counts."""


def model_graph(name: str, batch: int, *, train: bool = True, double: bool = True) -> Graph:
    """Return a tiny model in float64 (or float32), as a training step or for inference."""
    graph = with_relays(find_blocks(load(models.build(name, **TINY[name]), batch=batch)))
    if double:
        graph = as_float64(graph)
    return training_step(graph) if train else graph


@cache
def model_rules(name: str, cache_dir: Path, *, train: bool = True) -> Rules:
    """Return the rules of a tiny model, discovered with a batch that no other size equals."""
    return discover(model_graph(name, 10, train=train), cache_dir=cache_dir)


def random_choice(tables: Tables, rng: np.random.Generator) -> Choice:
    """Return any choice that is possible: the best one for random prices of strategies and no other costs."""
    costs = [rng.random(node.count) for node in tables.nodes]
    edges = [(edge.first, edge.second, np.where(np.isfinite(edge.table), 0.0, np.inf)) for edge in tables.edges]
    choice = solvers.load("auto").solve(Problem.build(costs, edges), time_limit=5.0).choice
    assert choice is not None, "replicating everything is always possible"
    return choice


def random_plan(
    folded: Folded,
    rules: Rules,
    configuration: Configuration,
    samples: int,
    seed: int,
    *,
    train: bool = True,
    constraints: Constraints = FREE,
) -> Plan:
    """Return a plan with random placements, stage boundaries and recompute; two stages per group in a V."""
    rng = np.random.default_rng(seed)
    apart = bool(configuration.shares)
    tables = constraints.tables(folded, rules, configuration.mesh, COSTS, rows_apart=apart)
    assert tables is not None, "the mesh can do it"
    choice = random_choice(tables, rng)
    count, blocks = configuration.num_stages, folded.num_blocks
    cuts = [0, *sorted(rng.choice(np.arange(1, blocks), count - 1, replace=False).tolist()), blocks]
    ranges = tuple((cuts[i], cuts[i + 1]) for i in range(count))
    flavours = list(ON_DEVICE) if train else [Recompute.NONE]
    split = Split.uniform(ranges, tuple(flavours[number] for number in rng.integers(0, len(flavours), count)))
    seconds = StepTime(1.0, 1.0, 0.0, np.ones(count))
    candidate = Candidate(configuration, tables, choice, split, seconds)
    batch = int(samples * (mean_microbatches(configuration.shares) if apart else configuration.num_microbatches))
    plan = any_recompute(written(candidate, batch, train), folded, rng)
    plan = any_offload(plan, np.random.default_rng([seed, 1])) if train else plan
    schedule = configuration.schedule
    return interleave(plan, count // 2, schedule) if schedule in ("zb-v", "dualpipe-v") else plan


def any_recompute(plan: Plan, folded: Folded, rng: np.random.Generator) -> Plan:
    """Return a plan in which selective recompute runs any ops again, and sometimes every block has its own flavour."""

    def any_selective(blocks: tuple[BlockPlan, ...]) -> tuple[BlockPlan, ...]:
        found = []
        for block in blocks:
            names = [op.name for op in folded.kinds[block.kind].ops if is_forward(op)]
            share = rng.choice([0.3, 0.8])
            found.append(replace(block, selective=tuple(name for name in names if rng.random() < share)))
        return tuple(found)

    blocks = any_selective(plan.blocks)
    variants = tuple(replace(variant, blocks=any_selective(variant.blocks)) for variant in plan.variants)
    stages = []
    for stage in plan.stages:
        flavours = stage.flavours
        if set(flavours) != {Recompute.NONE} and rng.random() < 0.3:
            flavours = tuple(ON_DEVICE[number] for number in rng.integers(0, 3, len(flavours)))
        stages.append(replace(stage, recompute=format_recompute(flavours)))
    return replace(plan, blocks=blocks, stages=tuple(stages), variants=variants)


def any_offload(plan: Plan, rng: np.random.Generator) -> Plan:
    """Return a plan in which some stages keep in host memory what some blocks save, or the optimizer's state."""
    stages = []
    for stage in plan.stages:
        flavours = stage.flavours
        if rng.random() < 0.4:
            share = rng.choice([0.5, 1.0])
            flavours = tuple(Recompute.OFFLOAD if rng.random() < share else flavour for flavour in flavours)
        share = rng.choice([0.0, 0.0, 0.5, 1.0])
        away = tuple(bool(own) for own in rng.random(len(flavours)) < share)
        stages.append(replace(stage, recompute=format_recompute(flavours), offload=format_hosted(away)))
    return replace(plan, stages=tuple(stages))


def solved_plan(
    folded: Folded,
    rules: Rules,
    configuration: Configuration,
    samples: int,
    limit: float = 1e12,
    costs: CostModel = COSTS,
) -> Plan:
    """Return the best plan of one configuration under a limit of bytes per device."""
    candidate = solved_candidate(folded, rules, configuration, samples, limit, costs)
    return written(candidate, samples * configuration.num_microbatches, True)


def solved_candidate(
    folded: Folded,
    rules: Rules,
    configuration: Configuration,
    samples: int,
    limit: float = 1e12,
    costs: CostModel = COSTS,
    constraints: Constraints = FREE,
) -> Candidate:
    """Return the same before it is written down."""
    candidates = found_candidates(folded, rules, configuration, samples, limit, costs, constraints)
    assert candidates, f"nothing fits {limit} bytes"
    return candidates[0]


def found_candidates(
    folded: Folded,
    rules: Rules,
    configuration: Configuration,
    samples: int,
    limit: float,
    costs: CostModel = COSTS,
    constraints: Constraints = FREE,
) -> list[Candidate]:
    """Return what a search of one configuration finds."""
    search = search_of(folded, rules, configuration, samples, limit, costs, constraints)
    tables = search.tables((configuration,))
    assert tables is not None, "constraints leave something"
    return [
        Candidate(own.configuration, tables, own.choice, own.split, own.time, own.draft)
        for own in run_search([configuration], search).candidates
    ]


def search_of(
    folded: Folded,
    rules: Rules,
    configuration: Configuration,
    samples: int,
    limit: float,
    costs: CostModel = COSTS,
    constraints: Constraints = FREE,
) -> SearchContext:
    """Return the inputs of a search of one configuration."""
    batch = samples * configuration.num_microbatches
    return SearchContext(
        folded=lambda _: folded,
        rules=lambda _: rules,
        costs=costs,
        solver=solvers.load("auto"),
        roofline=roofline(folded, folded, (samples, samples), costs),
        global_batch=batch,
        memory_limit=limit,
        keep=1,
        time_limit=120.0,
        settings=SearchSettings(overtime_seconds=0.0),
        progress=silent,
        should_stop=never,
        constraints=constraints,
    )


def written(candidate: Candidate, batch: int, train: bool) -> Plan:
    """Return the plan of a candidate as its file gives it back."""
    configuration = candidate.configuration
    gpus = configuration.num_stages * configuration.mesh.size
    job = Job("train" if train else "infer", gpus, batch, 1e12, COSTS.cluster.to_dict())
    return Plan.from_json(assemble(candidate, ModelInfo("tiny", "zoo:tiny", "00", 0), job).to_json())


def interleave(plan: Plan, num_groups: int, schedule: str = "interleaved") -> Plan:
    """Return a plan whose stages take turns on so many groups of devices, as a schedule says."""
    size = len({device for stage in plan.stages for device in range(*stage.devices)}) // len(plan.stages)
    turns = SCHEDULES[schedule].groups(num_groups, len(plan.stages) // num_groups)
    stages = tuple(
        replace(stage, devices=(group * size, (group + 1) * size))
        for stage, group in zip(plan.stages, turns, strict=True)
    )
    return replace(plan, stages=stages, schedule=schedule, job=replace(plan.job, gpus=num_groups * size))


def model_feeds(name: str, graph: Graph, count: int) -> tuple[list[dict[str, Array]], dict[str, Array]]:
    """Return random data for each of `count` microbatches, and a state: start values shaken, moments above zero."""
    rng = np.random.default_rng(count)
    start = models.initial_values(models.build(name, **TINY[name]))
    return random_feeds(graph, count, {key: array + rng.normal(0, 0.1, array.shape) for key, array in start.items()})


def random_feeds(
    graph: Graph, count: int, given: Mapping[str, Array]
) -> tuple[list[dict[str, Array]], dict[str, Array]]:
    """Return random data for each of `count` microbatches, and a random state around the given tensors."""
    rng = np.random.default_rng(7)
    states: dict[str, Array] = {}
    for state in graph.states:
        shape = graph.values[state.input].shape
        match state.role:
            case Role.PARAMETER | Role.BUFFER:
                states[state.input] = given[state.input] if state.input in given else rng.normal(size=shape)
            case Role.GRADIENT:
                states[state.input] = np.zeros(shape)
            case Role.MOMENT:
                states[state.input] = rng.uniform(0.1, 1.0, shape)
    microbatches: list[dict[str, Array]] = []
    for _ in range(count):
        data: dict[str, Array] = {}
        for name in graph.inputs:
            value = graph.values[name]
            whole = rng.integers(0, 8 if name == "labels" else 24, value.shape)
            data[name] = rng.normal(size=value.shape) if value.is_float else whole
        if STEP in graph.inputs:
            data[STEP] = np.asarray(3.0, graph.values[STEP].dtype)
        microbatches.append(data)
    return microbatches, states


def run_unpartitioned(
    graph: Graph, microbatches: Sequence[Mapping[str, Array]], states: Mapping[str, Array]
) -> StepResult:
    """Run a step on one device: each microbatch through the whole graph, gradients summed, the last update kept."""
    feeds: dict[str, Array] = {}
    scale = graph.metadata.get(LOSS_SCALE)
    if scale is not None:
        held = graph.constants[scale]
        feeds[scale] = np.asarray(held.astype(np.float64) / len(microbatches), held.dtype)
    current, outputs, values = dict(states), [], dict(states)
    for data in microbatches:
        values = run_graph(graph, {**feeds, **data, **current}, EXECUTOR)
        outputs.append({name: values[name] for name in graph.outputs})
        current |= {state.input: values[state.output] for state in graph.states if state.role is Role.GRADIENT}
    after = {state.input: values[state.output] for state in graph.states}
    gradients = {state.owner: after[state.input] for state in graph.states if state.role is Role.GRADIENT}
    return StepResult(tuple(outputs), gradients, after, ())


def check_close(found: Mapping[str, Array], expected: Mapping[str, Array], tolerance: float = TOLERANCE) -> float:
    """Assert that tensors have the same names, shapes, types and numbers; return the largest deviation."""
    assert found.keys() == expected.keys()
    largest = 0.0
    for name, array in expected.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype), name
        scale = max(float(np.max(np.abs(array), initial=0.0)), SMALLEST)
        np.testing.assert_allclose(found[name], array, rtol=0.0, atol=tolerance * scale, err_msg=name)
        largest = max(largest, float(np.max(np.abs(found[name] - array), initial=0.0)) / scale)
    return largest


def next_states(graph: Graph, states: Mapping[str, Array]) -> dict[str, Array]:
    """Return the states a step leaves behind as those the next one starts with: gradient buffers are emptied."""
    buffers = {state.input for state in graph.states if state.role is Role.GRADIENT}
    return {name: np.zeros_like(array) if name in buffers else array for name, array in states.items()}


def next_data(graph: Graph, microbatches: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
    """Return the same data for the next step: the optimizer counts one more."""
    counted = STEP in graph.inputs
    return [{**data, **({STEP: data[STEP] + 1} if counted else {})} for data in microbatches]


@dataclass(frozen=True, slots=True, eq=False)
class Execution:
    """A model with data and what it computes unpartitioned.

    Attributes:
        folded: The model.
        microbatches: Data of the first step.
        states: States before the first step.
        expected: What each step computes.
        tolerance: By how much a plan may deviate from that, relative to the largest element of a tensor.
    """

    folded: Folded
    microbatches: Sequence[Mapping[str, Array]]
    states: Mapping[str, Array]
    expected: Sequence[StepResult]
    tolerance: float = TOLERANCE

    @classmethod
    def of(
        cls, name: str, samples: int, count: int, *, train: bool = True, steps: int = 1, double: bool = True
    ) -> "Execution":
        """Return a tiny model of the zoo, in float64 or float32, on `count` random microbatches."""
        graph = model_graph(name, samples, train=train, double=double)
        data, states = model_feeds(name, graph, count)
        if double:
            return cls.of_graph(graph, data, states, steps=steps)
        single = cls.of_graph(graph, [_single(each) for each in data], _single(states), steps=steps)
        return replace(single, tolerance=TOLERANCE_FLOAT32)

    @classmethod
    def of_graph(
        cls,
        graph: Graph,
        microbatches: Sequence[Mapping[str, Array]],
        states: Mapping[str, Array],
        *,
        steps: int = 1,
    ) -> "Execution":
        """Return any graph with data."""
        data, current, expected = microbatches, states, []
        for _ in range(steps):
            expected.append(run_unpartitioned(graph, data, current))
            data, current = next_data(graph, data), next_states(graph, expected[-1].states)
        return cls(fold(graph), microbatches, states, expected)

    def program(self, plan: Plan) -> Program:
        """Return the lowered plan, verified."""
        program = lower(plan, self.folded, COSTS)
        verify_program(program, self.folded)
        return program

    def check(self, plan: Plan) -> float:
        """Assert that a plan computes what the model computes; return the largest deviation."""
        return self.check_program(self.program(plan))

    def check_program(self, program: Program) -> float:
        """Assert that a program computes what the model computes, step after step; return the largest deviation.

        If it does not, the error names the first op that differs.
        """
        data, states, graph = self.microbatches, self.states, self.folded.graph
        largest = 0.0
        for expected in self.expected:
            try:
                found = run_step(program, self.folded, data, states, EXECUTOR)
                pairs = [*zip(found.outputs, expected.outputs, strict=True)]
                pairs += [(found.gradients, expected.gradients), (found.states, expected.states)]
                largest = max(largest, *(check_close(*pair, self.tolerance) for pair in pairs))
            except (AssertionError, ProgramError):
                run_step(program, self.folded, data, states, EXECUTOR, check=self.tolerance)
                raise
            data, states = next_data(graph, data), next_states(graph, found.states)
        return largest


def _single(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return arrays with floats in float32."""
    return {name: array.astype(np.float32) if array.dtype.kind == "f" else array for name, array in arrays.items()}

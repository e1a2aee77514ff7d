"""Kernels of several ops: what they cost, which may be, and what a search for them finds."""

import random
from dataclasses import replace
from functools import cache

import msgspec
import numpy as np
import pytest

from autopar.cluster import load_cluster
from autopar.cost import IDEAL, MIXED, CostModel, Kernel, load_policy
from autopar.cost.fusion import Fused, Work, fuse
from autopar.cost.learned_kernels import LearnedKernels
from autopar.degrees import Degrees
from autopar.errors import PlanError
from autopar.folding.fold import Folded
from autopar.frameworks.pytorch import export
from autopar.fusion import OpSearch, fuse_jointly
from autopar.fusion.exact_ops import best_kernels
from autopar.fusion.ops import PHASES, fuse_ops, segment_fusion
from autopar.fusion.segment_kernels import SegmentKernels
from autopar.fusion_plan import FusionPlan, OpGroup
from autopar.ir.graph import Op, Phase
from autopar.plan import Plan
from autopar.prediction import Predictor
from autopar.program.lower import lower
from autopar.program.op_groups import find_cycle
from autopar.program.records import Compute, Program
from autopar.program.text import format_program, parse_program
from autopar.program.verify import verify_program
from autopar.simulate import simulate
from autopar.task import job_machine
from tests.formulations import rules, workload

_QUICK = OpSearch(unchanged=20)


def _op(name: str, kind: str, inputs: str) -> Op:
    return Op(name, kind, tuple(inputs.split()), (name,), (), Phase.FORWARD, 0)


_RANKS = dict.fromkeys(("x", "y", "w", "a", "b", "c", "d", "n"), 2)
_OPS = [_op("a", "Gelu", "x"), _op("m", "MatMul", "a w"), _op("b", "Mul", "a y"), _op("n", "LayerNormalization", "b y")]


def test_a_stated_kernel_takes_the_place_of_chains() -> None:
    """A norm reads what is added before it from registers; what a product reads, too, is written."""
    found = fuse(_OPS, _RANKS, "chains", [Kernel(("a", "b", "n"))])

    assert found == {
        "b": Fused(frozenset({0}), frozenset({0}), "a"),
        "n": Fused(frozenset({0, 1}), frozenset(), "a"),
    }
    assert fuse(_OPS, _RANKS, "chains", []) == {}


def test_an_op_that_runs_again_is_not_read() -> None:
    """The kernel of b and n computes a from x, which it reads, and a has its own kernel for the product."""
    kernel = Kernel(("b", "n"), ("a",))
    work = Work.of(_OPS, _RANKS, "chains")

    assert work.fused(kernel)["b"] == Fused(frozenset({0}), frozenset({0}))
    assert work.repeated(kernel) == {"a": Fused(frozenset(), frozenset({0}), "a")}


def test_kernels_that_wait_for_each_other_are_found() -> None:
    """With a and d in one kernel, b between them cannot run; nor can two kernels that each need the other first."""
    ops = [_op("a", "Gelu", "x"), _op("b", "MatMul", "a w"), _op("c", "Relu", "x"), _op("d", "Mul", "b c")]

    assert find_cycle(ops, {}, {}) == []
    assert find_cycle(ops, {"a": "a", "c": "a"}, {}) == []
    assert find_cycle(ops, {"a": "a", "d": "a"}, {}) == ["a", "d"]
    both = [_op("a", "Gelu", "x"), _op("b", "Relu", "a"), _op("c", "Relu", "y"), _op("d", "Mul", "c x")]
    assert set(find_cycle(both, {"a": "a", "d": "a", "b": "b", "c": "b"}, {})) == {"a", "b", "c", "d"}


@cache
def _case() -> tuple[Plan, Program, Folded, CostModel]:
    """Return a data-parallel plan of a small GPT on 16 devices of two nodes with 25 Gb/s."""
    predictor = Predictor(workload("gpt2"), known=rules("gpt2"), verify=False)
    machine = job_machine(16, load_cluster("v100-aws"))
    degrees = predictor.settled(Degrees(dp=16, microbatch=4, global_batch=64))
    program, plan = predictor.lowered(degrees, machine, IDEAL)
    return plan, program, predictor.workload.folded(degrees.samples), CostModel(machine, MIXED, IDEAL)


def test_fused_together_nothing_is_slower() -> None:
    """The joint result is no slower than ops alone, gradients alone or neither, and takes what its plan takes."""
    plan, program, folded, costs = _case()

    found = fuse_jointly(plan, program, folded, costs, _QUICK)

    assert found.fusion is not None
    assert found.fusion.groups
    assert found.ops.after < found.ops.before
    assert found.step_seconds <= min(found.neither, found.ops_only, found.buckets_only)
    assert found.neither == pytest.approx(simulate(program, costs).step_seconds)
    again = lower(replace(plan, fusion=found.fusion), folded, costs)
    assert simulate(again, costs).step_seconds == pytest.approx(found.step_seconds)
    read = Plan.from_json(replace(plan, fusion=found.fusion).to_json())
    assert read.fusion == found.fusion


def test_torch_compiles_the_modules_that_kernels_are_in() -> None:
    """The script names the layers whose kind has kernels; a block that is no module, as the head, is told apart."""
    plan, _, folded, _ = _case()
    layer, head = folded.chain[1], folded.chain[-1]
    ops = [tuple(op.name for op in folded.kinds[kind].ops[:2]) for kind in (layer, head)]
    fusion = FusionPlan((), (OpGroup(layer, ops[0]), OpGroup(head, ops[1])))

    found, plain = (export(replace(plan, fusion=own), folded) for own in (fusion, None))

    layers = [f"layers.{number}" for number in range(folded.chain.count(layer))]
    assert f"\nCOMPILED = {layers}  #" in found.text
    assert any("2 kernels of several ops: compile_regions compiles" in told for told in found.lost)
    assert any(f"kernels of blocks of kind {head}, which are no module" in told for told in found.lost)
    assert "\nCOMPILED = []  #" in plain.text
    assert not any("kernels" in told for told in plain.lost)


def test_kernels_change_no_number() -> None:
    """A program with kernels of several ops runs the same instructions, so executors compute the same; it is lawful."""
    plan, program, folded, costs = _case()
    ops = fuse_ops(program, costs, len(folded.kinds), _QUICK)

    fused = lower(replace(plan, fusion=FusionPlan((), ops.groups)), folded, costs)

    verify_program(fused, folded)
    assert parse_program(format_program(fused)) == fused
    assert any(isinstance(item, Compute) and item.kernel for own in fused.segments for item in own.instructions)
    plain = tuple(
        replace(
            own,
            instructions=tuple(
                replace(item, kernel="", again=()) if isinstance(item, Compute) else item for item in own.instructions
            ),
        )
        for own in fused.segments
    )
    assert plain == lower(plan, folded, costs).segments


def test_the_same_seed_finds_the_same_kernels() -> None:
    _, program, folded, costs = _case()

    first, second = (fuse_ops(program, costs, len(folded.kinds), OpSearch(unchanged=20, seed=3)) for _ in range(2))

    assert first == second
    assert first.after <= first.before


def test_duplication_pays_where_reading_costs_more() -> None:
    """Of one value that two norms read, each behind an addition of its own, an op is repeated only if that is cheaper.

    Whatever the search does, a kernel that repeats an op reads what that reads: its seconds are those of the bytes.
    """
    _, _, _, costs = _case()
    shapes = [np.array([[64, 64]])]
    sizes = dict.fromkeys(_RANKS, 2.0)
    work = Work.of(_OPS, _RANKS, "chains")
    repeated = work.repeated(Kernel(("b", "n"), ("a",)))["a"]

    seconds = float(costs.op_seconds(_OPS[0], shapes, shapes, sizes, repeated)[0])

    alone = float(costs.op_seconds(_OPS[0], shapes, shapes, sizes)[0])
    assert 0 < seconds < alone


@pytest.mark.parametrize(
    ("ops", "again", "message"),
    [
        (("attn_resid", "mlp.gelu"), (), "there is no op '.*attn_resid'; there are '.*attn_residual'"),
        (("#", "attn_residual"), (), "there is no op '#'; there are '.*', '.*attn_residual'"),
        (("mlp.gelu", "mlp.up.matmul"), (), r"mlp.up.matmul' \(MatMul\) starts a kernel"),
        (("attn_residual", "mlp.gelu.vjp.0"), (), "of several phases"),
        (("attn_norm", "mlp_norm"), (), "more than one of its ops reduces"),
        (("attn_residual",), ("attn_residual",), "is in it twice"),
        (
            ("attn_residual", "mlp_residual"),
            (),
            "for each other: '.*attn_residual', '.*mlp_residual', with '.*mlp_norm'",
        ),
    ],
)
def test_kernels_that_cannot_be_are_refused(ops: tuple[str, ...], again: tuple[str, ...], message: str) -> None:
    """With the kernel, its kind of block and the op at fault."""
    plan, _, folded, costs = _case()
    kind, name = next(
        (kind.id, op.name) for kind in folded.kinds for op in kind.ops if op.name.endswith(".attn_residual")
    )
    layer = name.removesuffix("attn_residual")
    own, others = (tuple(name if name == "#" else layer + name for name in names) for names in (ops, again))
    group = OpGroup(kind, own, others)

    with pytest.raises(PlanError, match=message):
        lower(replace(plan, fusion=FusionPlan((), (group,))), folded, costs)


@pytest.mark.parametrize(("kind", "variant"), [(99, 0), (0, 3)])
def test_kernels_of_blocks_that_are_not_there_are_refused(kind: int, variant: int) -> None:
    plan, _, folded, costs = _case()
    fusion = FusionPlan((), (OpGroup(kind, ("a", "b"), variant=variant),))

    with pytest.raises(PlanError, match=f"the kernel of a, b is in blocks of kind {kind} of variant {variant}; the"):
        lower(replace(plan, fusion=fusion), folded, costs)


def test_the_search_reaches_the_optimum_of_small_segments() -> None:
    """CP-SAT proves the best kernels of each segment of a small GPT; without duplication the search finds them."""
    _, program, _, costs = _case()
    search = OpSearch(duplicates=False)

    for segment in program.segments:
        if segment.phase in PHASES:
            best, found = best_kernels(segment, costs, most_ops=6), segment_fusion(segment, costs, search)

            assert found == pytest.approx(best.seconds, rel=1e-9)
            assert best.bound == pytest.approx(best.seconds, rel=1e-6)


def test_kernels_found_lawful_wait_for_none_of_each_other() -> None:
    """What is checked kernel by kernel in a search is what lowering checks of a whole block."""
    _, program, _, costs = _case()
    draw = random.Random(1)

    for segment in program.segments:
        if segment.phase not in PHASES:
            continue
        own = SegmentKernels(segment, costs)
        pairs = own.pairs()
        for _ in range(40 if pairs else 0):
            chosen = [set(pair) for pair in draw.sample(pairs, min(len(pairs), draw.randint(1, 4)))]
            groups: list[set[str]] = []
            for pair in chosen:
                met = [group for group in groups if group & pair]
                groups = [group for group in groups if not group & pair] + [set().union(pair, *met)]
            kernels = own.ordered(own.kernel(group) for group in groups)
            kernel = {name: group.ops[0] for group in kernels for name in group.ops}
            ops = [compute.op for compute in own.computes.values()]

            circle = find_cycle(ops, kernel, {})

            assert own.are_lawful(kernels) == (not circle and all(own.is_allowed(group) for group in kernels))


def test_learned_costs_price_the_kernels_of_a_simulated_step() -> None:
    """On their processor learned costs count in the search and in the step; the answer says how often."""
    predictor = Predictor(workload("gpt2"), known=rules("gpt2"), verify=False)
    machine, policy = job_machine(16, load_cluster("v100-aws")), load_policy("fp32")
    degrees = predictor.settled(Degrees(dp=16, microbatch=4, global_batch=64))
    program, _ = predictor.lowered(degrees, machine, IDEAL, policy=policy)
    shipped = LearnedKernels.load("onnxruntime")
    own = replace(shipped, provenance=msgspec.structs.replace(shipped.provenance, machine=machine.device.name))
    span = msgspec.structs.replace(own.range, least_elements=1)
    plain = CostModel(machine, policy, IDEAL)

    costs = replace(plain, kernels=replace(own, range=span))
    found = fuse_ops(program, costs, len(predictor.workload.folded(degrees.samples).kinds), _QUICK)

    assert costs.learned is not None
    assert simulate(program, replace(plain, kernels=shipped)).step_seconds == simulate(program, plain).step_seconds
    assert simulate(program, costs).step_seconds > simulate(program, plain).step_seconds  # a processor is slower
    assert found.after <= found.before
    assert costs.learned.known
    assert "kernels by what was learned of onnxruntime" in costs.learned.told()

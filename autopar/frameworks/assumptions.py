"""What the simulator assumes of the software that runs a plan, and what makes each framework do it: one table.

`ASSUMPTIONS` has a row per assumption and an answer per framework: arguments that ask for it (`Told`), nothing because
the framework does so unasked (`Inherent`), or why it does otherwise (`Otherwise`), with the change of the software
stack under which the plan is simulated before it is exported. docs/export.md shows the table.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod

from autopar.cluster import cluster_from_dict
from autopar.context_parallelism import ContextKind
from autopar.cost import load_policy
from autopar.cost.stack import Stack
from autopar.frameworks.abilities import ABILITIES, nearest_context
from autopar.frameworks.facts import Facts
from autopar.frameworks.known import ROTATE_METHODS
from autopar.schedule import SCHEDULES
from autopar.training.chunked_loss import CHUNKED
from autopar.workload import job_stack

Change = Callable[[Stack], Stack]
"""What a software stack is without something that a framework cannot do."""


@dataclass(frozen=True, slots=True)
class Told:
    """A framework does what is assumed if it is told to.

    Attributes:
        arguments: Arguments, or fields by dotted name, with their values; True for a flag.
    """

    arguments: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Inherent:
    """A framework does what is assumed without being told to.

    Attributes:
        how: What does it.
    """

    how: str


@dataclass(frozen=True, slots=True)
class Otherwise:
    """A framework does otherwise than is assumed, or its configuration has no word for it.

    Attributes:
        why: What it does.
        change: The stack it runs; None where no stack says it, so that it is listed and not simulated.
        arguments: What asks for the nearest that it does, as of `Told`.
    """

    why: str
    change: Change | None = None
    arguments: Mapping[str, object] = field(default_factory=dict)


Answer = Told | Inherent | Otherwise


@dataclass(frozen=True, slots=True)
class Assumption:
    """One thing that the simulator assumes.

    Attributes:
        name: What it is about, as the table of docs/export.md calls it.
        applies: Whether it is assumed of a plan.
        sentence: What is assumed of a plan.
        answers: What each framework makes of it, given the plan: every column of `COLUMNS`, and targets that differ
            from their column.
    """

    name: str
    applies: Callable[[Facts], bool]
    sentence: Callable[[Facts], str]
    answers: Mapping[str, Answer | Callable[[Facts], Answer]]


COLUMNS = ("megatron", "torchtitan", "deepspeed", "fsdp", "maxtext")
"""Frameworks with answers of their own."""
COLUMN_OF: Mapping[str, str] = {
    "megatron": "megatron",
    "nemo": "megatron",
    "torchtitan": "torchtitan",
    "deepspeed": "deepspeed",
    "accelerate": "fsdp",
    "trainer": "fsdp",
    "fsdp": "fsdp",
    "maxtext": "maxtext",
}
"""Column of each target: Megatron-Bridge passes fields of Megatron-Core on, accelerate and Trainer run FSDP2."""

CONTEXT: Mapping[ContextKind, str] = {
    "ring": "context parallelism passes keys and values round in a ring beside attention, whose work zigzag balances",
    "gather": "context parallelism gathers keys and values whole in every layer",
    "ulysses": "context parallelism exchanges positions for heads by all-to-all",
}
"""What is assumed of each kind of context parallelism."""
CP_COMM_TYPES: Mapping[ContextKind, str] = {"ring": "p2p", "gather": "all_gather", "ulysses": "a2a"}
"""Values of Megatron-LM's --cp-comm-type; p2p is the default."""
_MAXTEXT_CONTEXT: Mapping[ContextKind, str] = {"ring": "ring", "gather": "all_gather", "ulysses": "ulysses"}
"""Values of MaxText's context_parallel_strategy."""
TWO_LEVELS = ("ulysses", "ring")
"""Kinds of context parallelism, from inside, that Megatron-LM runs together."""
FULL_SHARDING = (2, 3)
"""ZeRO levels that Megatron's FSDP runs, whose units are layers."""


def answers_of(facts: Facts, target: str) -> list[tuple[Assumption, Answer]]:
    """Return what is assumed of a plan, and what a framework makes of each.

    Args:
        facts: The plan.
        target: A key of `COLUMN_OF`.
    """
    found = []
    for row in ASSUMPTIONS:
        if row.applies(facts):
            answer = row.answers.get(target, row.answers[COLUMN_OF[target]])
            found.append((row, answer if isinstance(answer, Told | Inherent | Otherwise) else answer(facts)))
    return found


def told(facts: Facts, target: str) -> dict[str, object]:
    """Return the arguments, or fields by dotted name, that make a framework do what is assumed of a plan."""
    found: dict[str, object] = {}
    for _, answer in answers_of(facts, target):
        if not isinstance(answer, Inherent):
            found |= answer.arguments
    return found


def taken_for_granted(facts: Facts, target: str) -> tuple[str, ...]:
    """Return what is assumed of a plan and a framework does otherwise, or cannot be told, a sentence each."""
    return tuple(
        f"{row.sentence(facts)}; {answer.why}" if answer.why else row.sentence(facts)
        for row, answer in answers_of(facts, target)
        if isinstance(answer, Otherwise)
    )


def stack_run(facts: Facts, target: str) -> tuple[Stack, tuple[str, ...]]:
    """Return the software stack of a plan without what a framework cannot do, and what that is, a phrase each."""
    stack, missing = job_stack(facts.plan.job), []
    for _, answer in answers_of(facts, target):
        if isinstance(answer, Otherwise) and answer.change is not None:
            changed = answer.change(stack)
            if changed != stack:
                missing.append(answer.why)
                stack = changed
    return stack, tuple(missing)


# What applies.


def _stack(facts: Facts) -> Stack:
    return job_stack(facts.plan.job)


def _shares_data(facts: Facts) -> bool:
    return facts.dp * facts.cp > 1


def _gathers(facts: Facts) -> bool:
    return facts.zero > 0 and _shares_data(facts)


def hides_tp(facts: Facts) -> bool:
    """Return whether a plan has collectives of tensor parallelism that its stack runs beside products."""
    return facts.tp > 1 and facts.sequence_parallel and _stack(facts).hides_tp


def hides_dispatch(facts: Facts) -> bool:
    """Return whether tokens travel to experts beside the compute of another microbatch: by stack or by schedule."""
    return facts.ep > 1 and (_stack(facts).hides_dispatch or SCHEDULES[facts.plan.schedule].hides_dispatch)


def overlaps_shared(facts: Facts) -> bool:
    """Return whether tokens travel to experts beside the shared experts of their own layer."""
    return facts.ep > 1 and _stack(facts).covers_rows and not hides_dispatch(facts) and facts.shared_experts


def _has_experts(facts: Facts) -> bool:
    return facts.sizes is not None and facts.sizes.experts > 0


def _capacity(facts: Facts) -> float:
    return 0.0 if facts.sizes is None else facts.sizes.capacity


def _half(facts: Facts) -> str:
    return load_policy(facts.plan.job.precision).half


def _devices_per_node(facts: Facts) -> int:
    return cluster_from_dict(facts.plan.job.cluster).devices_per_node


def _is_tpu(facts: Facts) -> bool:
    return str(facts.plan.job.cluster.get("name", "")).startswith("tpu")


# Changes of a stack.


def _without_tp_overlap(stack: Stack) -> Stack:
    return replace(stack, hides_tp=False)


def _without_dispatch_overlap(stack: Stack) -> Stack:
    return replace(stack, hides_dispatch=False)


def _without_shared_overlap(stack: Stack) -> Stack:
    return replace(stack, overlaps_shared=False)


def _dispatching_by_all_to_all(stack: Stack) -> Stack:
    return replace(stack, dispatch="all-to-all")


def _with_each_expert(stack: Stack) -> Stack:
    return replace(stack, experts="each")


def _without_graphs(stack: Stack) -> Stack:
    return replace(stack, graphs="none")


def _with_float32_loss(stack: Stack) -> Stack:
    return replace(stack, loss="float32")


def _with_eager_loss(stack: Stack) -> Stack:
    return replace(stack, loss="eager")


def _without_overlap(stack: Stack) -> Stack:
    return stack.with_scalars(exposed_share=1.0)


# Answers that depend on the plan.


def _megatron_buckets(facts: Facts) -> Answer:
    if facts.zero in FULL_SHARDING:
        return Otherwise("Megatron's FSDP reduces layer by layer")
    return Told({"--ddp-bucket-size": facts.bucket_elements})


def _deepspeed_gradients(facts: Facts) -> Answer:
    if facts.zero:
        return Told({"zero_optimization.overlap_comm": True})
    return Otherwise("DeepSpeed reduces after the backward without ZeRO", _without_overlap)


def _deepspeed_buckets(facts: Facts) -> Answer:
    if facts.zero:
        return Told({"zero_optimization.reduce_bucket_size": facts.bucket_elements})
    return Otherwise("DeepSpeed takes reduce_bucket_size with ZeRO only")


def _xla_buckets(facts: Facts) -> Answer:
    if facts.bucket is not None:
        return Inherent(f"XLA combines reductions up to the threshold of {facts.bucket.xla_flags}")
    return Otherwise("XLA combines reductions up to xla_gpu_reduce_scatter_combine_threshold_bytes")


def _deepspeed_gathers(facts: Facts) -> Answer:
    if facts.zero == 3:
        return Told({"zero_optimization.overlap_comm": True})
    return Otherwise("DeepSpeed gathers them after the update, in buckets of allgather_bucket_size")


def _megatron_context(facts: Facts) -> Answer:
    if facts.cp_kinds == TWO_LEVELS:  # heads are exchanged inside of rings
        inner = prod(found.axis.size for found in facts.axes if found.role == "cp" and found.axis.stride == facts.tp)
        sizes = (inner, facts.cp // inner)
        return Told({"--cp-comm-type": "a2a+p2p", "--hierarchical-context-parallel-sizes": sizes})
    return Told({"--cp-comm-type": CP_COMM_TYPES[nearest_context(facts, ABILITIES["megatron"]) or "gather"]})


def _context_among(known: Mapping[str, Answer], target: str) -> Callable[[Facts], Answer]:
    def answer(facts: Facts) -> Answer:
        ability = ABILITIES[target]
        if len(facts.cp_kinds) == 1 and nearest_context(facts, ability) == facts.cp_kind and facts.cp_kind in known:
            return known[facts.cp_kind]
        return Otherwise(f"{ability.name} has none of this kind")

    return answer


def _megatron_p2p(facts: Facts) -> Answer:
    if facts.interleave > 1:
        return Inherent("overlap_p2p_comm is the default of the interleaved schedule")
    return Otherwise("Megatron-LM's 1F1B without interleaving waits for what it sends")


_EXPERTS: Mapping[str, str] = {
    "each": "each expert of a device has a product of its own",
    "grouped": "the experts of a device are one product",
    "fused": "the experts of a device are one product with activation and cast in it",
}
"""What each choice of kernels for experts means."""


def _megatron_experts(facts: Facts) -> Answer:
    if _stack(facts).experts == "fused":
        return Otherwise(
            "fused kernels ask for --use-transformer-engine-op-fuser and NVTE_CUTEDSL_FUSED_GROUPED_MLP=1",
            _with_each_expert,
            {"--moe-grouped-gemm": True},
        )
    if _half(facts) == "bf16":
        return Told({"--moe-grouped-gemm": True})
    return Otherwise("Megatron-LM groups products of bfloat16 only")


_DEEPEP_NODE = 8
"""Devices joined by NVLink up to which DeepEP runs; HybridEP is for racks of more (pytorch/torchtitan,
torchtitan/distributed/deepep/__init__.py)."""
_ALL_TO_ALL = {"--moe-token-dispatcher-type": "alltoall"}


def _megatron_dispatch(facts: Facts) -> Answer:
    if _stack(facts).dispatch == "all-to-all":
        return Told(_ALL_TO_ALL)
    if _capacity(facts):
        why = "the flex dispatcher refuses --moe-pad-expert-input-to-capacity: tokens go by all-to-all"
        return Otherwise(why, _dispatching_by_all_to_all, _ALL_TO_ALL)
    backend = "deepep" if _devices_per_node(facts) <= _DEEPEP_NODE else "hybridep"
    return Told({"--moe-token-dispatcher-type": "flex", "--moe-flex-dispatcher-backend": backend})


def _plain_dispatch(name: str) -> Callable[[Facts], Answer]:
    def answer(facts: Facts) -> Answer:
        if _stack(facts).dispatch == "per-node":
            return Otherwise(f"{name} dispatches by all-to-all here", _dispatching_by_all_to_all)
        return Inherent("all-to-all is what it dispatches by")

    return answer


def _megatron_shared(facts: Facts) -> Answer:
    if _stack(facts).dispatch == "per-node" and not _capacity(facts):
        return Otherwise("Megatron-LM does so with the alltoall dispatcher only", _without_shared_overlap)
    if "shared_experts" in facts.recompute_modules:
        return Otherwise("Megatron-LM refuses that where shared experts alone run again", _without_shared_overlap)
    return Told({"--moe-shared-expert-overlap": True})


def _megatron_attention(facts: Facts) -> Answer:
    if _stack(facts).attention == "unfused":
        return Told({"--attention-backend": "unfused"})
    return Told({"--attention-backend": "fused" if facts.is_latent else "flash"})


def _maxtext_attention(facts: Facts) -> Answer:
    if _stack(facts).attention == "unfused":
        return Told({"attention": "dot_product"})
    return Told({"attention": "flash" if _is_tpu(facts) else "cudnn_flash_te"})


def _fused_attention(how: str) -> Callable[[Facts], Answer]:
    def answer(facts: Facts) -> Answer:
        if _stack(facts).attention == "unfused":
            return Otherwise(f"unfused attention: {how}")
        return Inherent(how)

    return answer


def _megatron_loss(facts: Facts) -> Answer:
    match _stack(facts).loss:
        case "fused":
            return Otherwise(
                "Megatron-LM refuses Transformer Engine's loss, and its own keeps probabilities in float32",
                _with_float32_loss,
                {"--cross-entropy-loss-fusion": True, "--cross-entropy-fusion-impl": "native"},
            )
        case "float32":
            return Told({"--cross-entropy-loss-fusion": True, "--cross-entropy-fusion-impl": "native"})
        case "eager":
            return Otherwise("Megatron-LM's loss keeps probabilities once")


def _bridge_loss(facts: Facts) -> Answer:
    if _stack(facts).loss == "fused":
        return Told({"--cross-entropy-loss-fusion": True, "--cross-entropy-fusion-impl": "te"})
    return _megatron_loss(facts)


def _eager_loss(facts: Facts) -> Answer:
    if _stack(facts).loss == "eager":
        return Inherent("torch.nn.functional.cross_entropy")
    return Otherwise("the loss of the model is torch.nn.functional.cross_entropy", _with_eager_loss)


def _megatron_graphs(facts: Facts) -> Answer:
    match _stack(facts).graphs:
        case "none":
            return Told({"--cuda-graph-impl": "none"})
        case "partial":
            modules = ("attn", "moe_router", "moe_preprocess") if _has_experts(facts) else ("attn", "mlp")
            return Told({"--cuda-graph-impl": "transformer_engine", "--cuda-graph-modules": modules})
        case "full":
            return Told({"--cuda-graph-impl": "full_iteration", "--no-check-for-nan-in-loss-and-grad": True})


def _torchtitan_graphs(facts: Facts) -> Answer:
    graphs = _stack(facts).graphs
    if graphs == "full" and facts.pp == facts.ep == 1:
        return Told({"training.disable_cuda_graphs": False})
    if graphs == "none":
        return Told({"training.disable_cuda_graphs": True})
    why = "torchtitan captures a whole step or nothing, and nothing in a pipeline or with expert parallelism"
    return Otherwise(why, _without_graphs)


def _no_graphs(facts: Facts) -> Answer:
    if _stack(facts).graphs == "none":
        return Inherent("kernels are launched one by one")
    return Otherwise("its configuration has no CUDA graphs", _without_graphs)


def _torchtitan_fusion(facts: Facts) -> Answer:
    return Told({"compile.enable": _stack(facts).fusion == "chains" or hides_tp(facts)})


def _fsdp_fusion(facts: Facts) -> Answer:
    return Told({"compile": _stack(facts).fusion == "chains"})


def _maxtext_capacity(facts: Facts) -> Answer:
    # Experts with a limited number of places are MaxText's dense dispatch, which groups no products.
    return Told({"capacity_factor": _capacity(facts), "sparse_matmul": False, "megablox": False})


def _maxtext_experts(facts: Facts) -> Answer:
    return Told({"sparse_matmul": not _capacity(facts), "megablox": not _capacity(facts)})


def _graph_words(facts: Facts) -> str:
    match _stack(facts).graphs:
        case "none":
            return "the host launches every kernel: there are no CUDA graphs"
        case "partial":
            return "CUDA graphs launch all but what depends on the tokens of an expert"
        case "full":
            return "CUDA graphs launch all of a step"


_TILES = 8
"""Parts of the tokens of a microbatch for which MaxText makes logits one after the other; torchtitan has as many."""
_CHUNKS = "the logits are made for some tokens at a time"


def _in_chunks(facts: Facts) -> bool:
    return facts.plan.job.loss == CHUNKED


def _chunked(answer: Answer, plain: Callable[[Facts], Answer]) -> Callable[[Facts], Answer]:
    """Return what a framework makes of a loss in chunks, and of one that is not."""
    return lambda facts: answer if _in_chunks(facts) else plain(facts)


_LOSSES: Mapping[str, str] = {
    "fused": "the cross-entropy keeps nothing beside the logits",
    "float32": "the cross-entropy keeps probabilities in float32",
    "eager": "the cross-entropy keeps float32 copies of the logits",
}
"""What each loss of a stack keeps."""
_XLA = Inherent("XLA's latency-hiding scheduler")


ASSUMPTIONS: tuple[Assumption, ...] = (
    Assumption(
        "gradient reduction beside the backward",
        _shares_data,
        lambda _: "gradients are reduced while the backward runs",
        {
            "megatron": Told({"--overlap-grad-reduce": True}),
            "torchtitan": Inherent("FSDP2 reduces a block while the next one runs"),
            "deepspeed": _deepspeed_gradients,
            "fsdp": Inherent("FSDP2 and DistributedDataParallel reduce while the backward runs"),
            "maxtext": _XLA,
        },
    ),
    Assumption(
        "size of gradient buckets",
        _shares_data,
        lambda facts: f"gradients are reduced in buckets of {facts.bucket_bytes / 1e6:.4g} MB",
        {
            "megatron": _megatron_buckets,
            "torchtitan": Otherwise("torchtitan reduces block by block and has no field for a size"),
            "deepspeed": _deepspeed_buckets,
            "fsdp": Otherwise("FSDP2 reduces block by block and has no field for a size"),
            "maxtext": _xla_buckets,
        },
    ),
    Assumption(
        "parameter gathers beside compute",
        _gathers,
        lambda _: "parameters are gathered while the blocks before compute",
        {
            "megatron": Told({"--overlap-param-gather": True}),
            "torchtitan": Inherent("FSDP2 prefetches the next block"),
            "deepspeed": _deepspeed_gathers,
            "fsdp": Inherent("FSDP2 prefetches the next block"),
            "maxtext": _XLA,
        },
    ),
    Assumption(
        "tensor-parallel collectives in chunks beside products",
        hides_tp,
        lambda _: "collectives of tensor parallelism run in chunks beside the products next to them",
        {
            "megatron": Told({"--tp-comm-overlap": True}),
            "torchtitan": Told({"compile.enable": True, "compile.enable_async_tensor_parallel": True}),
            "deepspeed": Otherwise("DeepSpeed waits for collectives of tensor parallelism", _without_tp_overlap),
            "fsdp": Otherwise("DTensor waits for collectives of tensor parallelism", _without_tp_overlap),
            "maxtext": Otherwise("XLA's collective products are flags of XLA, not of MaxText", _without_tp_overlap),
        },
    ),
    Assumption(
        "tensor-parallel collectives beside weight gradients",
        lambda facts: facts.tp > 1 and not hides_tp(facts),
        lambda _: "collectives of tensor parallelism in the backward run beside weight-gradient products",
        {
            "megatron": Inherent("ColumnParallelLinear reduces while it makes weight gradients"),
            "torchtitan": Otherwise("torchtitan waits for them without async tensor parallelism"),
            "deepspeed": Otherwise("DeepSpeed waits for them"),
            "fsdp": Otherwise("DTensor waits for them"),
            "maxtext": _XLA,
        },
    ),
    Assumption(
        "pipeline transfers beside compute",
        lambda facts: facts.pp > 1,
        lambda _: "a stage computes while what it made travels to the next one",
        {
            "megatron": _megatron_p2p,
            "torchtitan": Inherent("schedules of torch.distributed.pipelining send asynchronously"),
            "deepspeed": Otherwise("DeepSpeed's pipeline engine waits for what it sends"),
            "fsdp": Otherwise("FSDP has no pipelines"),
            "maxtext": _XLA,
        },
    ),
    Assumption(
        "update of a stage without waiting for the others",
        lambda facts: facts.pp > 1,
        lambda _: "no stage waits for a norm of all gradients before its update",
        dict.fromkeys(COLUMNS, Otherwise("clipping gradients by their norm does wait")),
    ),
    Assumption(
        "kind of context parallelism",
        lambda facts: facts.cp > 1,
        lambda facts: "; ".join(CONTEXT[kind] for kind in facts.cp_kinds) or "context parallelism",
        {
            "megatron": _megatron_context,
            "torchtitan": _context_among({"gather": Inherent("FlexAttention gathers keys and values")}, "torchtitan"),
            "deepspeed": _context_among({"ulysses": Inherent("UlyssesSPAttentionHF")}, "deepspeed"),
            "fsdp": _context_among(
                {kind: Told({"parallelism.cp_comm_strategy": name}) for kind, name in ROTATE_METHODS.items()}, "fsdp"
            ),
            "maxtext": _context_among(
                {kind: Told({"context_parallel_strategy": name}) for kind, name in _MAXTEXT_CONTEXT.items()}, "maxtext"
            ),
        },
    ),
    Assumption(
        "dispatch of tokens to experts",
        lambda facts: facts.ep > 1,
        lambda facts: (
            "tokens go to experts and back by all-to-all"
            if _stack(facts).dispatch == "all-to-all"
            else "tokens go to experts and back once per node (DeepEP, HybridEP)"
        ),
        {
            "megatron": _megatron_dispatch,
            "torchtitan": _plain_dispatch("torchtitan"),
            "deepspeed": _plain_dispatch("DeepSpeed"),
            "fsdp": Otherwise("FSDP deals out no experts"),
            "maxtext": _plain_dispatch("MaxText"),
        },
    ),
    Assumption(
        "dispatch beside the compute of another microbatch",
        hides_dispatch,
        lambda _: "tokens travel to experts and back beside the compute of another microbatch",
        {
            "megatron": Told({"--overlap-moe-expert-parallel-comm": True}),
            "torchtitan": Otherwise("torchtitan waits for the dispatch", _without_dispatch_overlap),
            "deepspeed": Otherwise("DeepSpeed waits for the dispatch", _without_dispatch_overlap),
            "fsdp": Otherwise("FSDP deals out no experts", _without_dispatch_overlap),
            "maxtext": Otherwise("MaxText waits for the dispatch", _without_dispatch_overlap),
        },
    ),
    Assumption(
        "dispatch beside shared experts",
        overlaps_shared,
        lambda _: "tokens travel to experts and back beside the shared experts of their layer",
        {
            "megatron": _megatron_shared,
            "torchtitan": Otherwise("torchtitan waits for the dispatch", _without_shared_overlap),
            "deepspeed": Otherwise("DeepSpeed waits for the dispatch", _without_shared_overlap),
            "fsdp": Otherwise("FSDP deals out no experts", _without_shared_overlap),
            "maxtext": Otherwise("MaxText waits for the dispatch", _without_shared_overlap),
        },
    ),
    Assumption(
        "experts as grouped products",
        _has_experts,
        lambda facts: _EXPERTS[_stack(facts).experts],
        {
            "megatron": _megatron_experts,
            "torchtitan": Inherent("GroupedExperts"),
            "deepspeed": Otherwise("DeepSpeed's MoE layer runs experts one after the other"),
            "fsdp": Otherwise("the model decides (experts_implementation of transformers)"),
            "maxtext": _maxtext_experts,
        },
    ),
    Assumption(
        "places of an expert",
        lambda facts: _has_experts(facts) and _capacity(facts) > 0,
        lambda facts: f"an expert takes {_capacity(facts):g} times its even share of tokens and drops the others",
        {
            "megatron": lambda facts: Told(
                {
                    "--moe-expert-capacity-factor": _capacity(facts),
                    "--moe-pad-expert-input-to-capacity": True,
                    "--moe-token-drop-policy": "position",
                }
            ),
            "torchtitan": Otherwise("torchtitan drops no token"),
            "deepspeed": Otherwise("give capacity_factor to the MoE layers"),
            "fsdp": Otherwise("models of transformers drop no token"),
            "maxtext": _maxtext_capacity,
        },
    ),
    Assumption(
        "even load of experts",
        lambda facts: _has_experts(facts) and not _capacity(facts),
        lambda _: "tokens choose all experts equally often",
        dict.fromkeys(COLUMNS, Otherwise("the router decides")),
    ),
    Assumption(
        "attention kernel",
        lambda _: True,
        lambda facts: (
            "attention is one kernel that keeps no scores (flash attention)"
            if _stack(facts).attention == "fused"
            else "attention is two batched products with a softmax between them"
        ),
        {
            "megatron": _megatron_attention,
            "torchtitan": _fused_attention("models of torchtitan run FlexAttention"),
            "deepspeed": Otherwise("the model decides"),
            "fsdp": Otherwise("the model decides (attn_implementation of transformers)"),
            "maxtext": _maxtext_attention,
        },
    ),
    Assumption(
        "memory of the loss",
        lambda _: True,
        lambda facts: _CHUNKS if _in_chunks(facts) else _LOSSES[_stack(facts).loss],
        {
            "megatron": _chunked(Otherwise("Megatron-LM 0.19 makes all of them"), _megatron_loss),
            "nemo": _chunked(Otherwise("Megatron-LM 0.19 makes all of them"), _bridge_loss),
            "torchtitan": Inherent("ChunkedLossWrapper makes logits in chunks"),
            "deepspeed": _chunked(Otherwise("call TiledFusedLogitsLoss of deepspeed in the script"), _eager_loss),
            "fsdp": _chunked(Otherwise("call the fused loss of Liger Kernel in the script"), _eager_loss),
            "trainer": _chunked(Told({"use_liger_kernel": True}), _eager_loss),
            "maxtext": _chunked(Told({"num_vocab_tiling": _TILES}), lambda _: Inherent("XLA fuses the loss")),
        },
    ),
    Assumption(
        "element-wise ops in one kernel",
        lambda _: True,
        lambda facts: (
            "neighbouring element-wise ops are one kernel"
            if _stack(facts).fusion == "chains"
            else "element-wise ops are a kernel each"
        ),
        {
            "megatron": Inherent("Transformer Engine and fused kernels of Megatron-Core"),
            "torchtitan": _torchtitan_fusion,
            "deepspeed": Otherwise("call engine.compile() after deepspeed.initialize"),
            "fsdp": _fsdp_fusion,
            "maxtext": Inherent("XLA fuses them"),
        },
    ),
    Assumption(
        "CUDA graphs",
        lambda facts: not _is_tpu(facts),
        _graph_words,
        {
            "megatron": _megatron_graphs,
            "torchtitan": _torchtitan_graphs,
            "deepspeed": _no_graphs,
            "fsdp": _no_graphs,
            "maxtext": Inherent("XLA's command buffers, on unless xla_gpu_enable_command_buffer is empty"),
        },
    ),
)
"""Every assumption of the simulator about software, with an answer of each framework."""

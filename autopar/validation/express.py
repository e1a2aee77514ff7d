"""What a published row says, as a case autopar can predict: model, degrees, cluster, numbers and stack.

Rules, not row ids. What a row does not state is filled first (`autopar.validation.completion`), and assumed where its
framework's habits allow it; every assumption is written down. What cannot be expressed gets a reason.
"""

import re
from dataclasses import dataclass, replace

from autopar import models
from autopar.cluster import PRESETS, Cluster, networks
from autopar.cost import Stack
from autopar.cost.policy import POLICIES, DtypePolicy, load_policy
from autopar.degrees import Degrees
from autopar.errors import AutoparError
from autopar.models.bert import BertConfig
from autopar.models.decoder_config import Attention, DecoderConfig, Experts, Norm, uniform
from autopar.models.gpt import GptConfig
from autopar.models.llama import LlamaConfig
from autopar.models.llama_reader import LLAMA
from autopar.models.published_decoders import PublishedConfig
from autopar.models.rotary import Rope
from autopar.models.spec import Config
from autopar.schedule import SCHEDULES
from autopar.training import Lora, read_lora
from autopar.validation.completion import InexpressibleError, complete
from autopar.validation.model_flops import step_flops
from autopar.validation.records import Row
from autopar.validation.stacks import stack_for

Model = tuple[str, Config]
"""Family and configuration."""


@dataclass(frozen=True, slots=True)
class Case:
    """A row as something to predict.

    Attributes:
        row: The row, completed.
        family: Family of the model.
        config: Its configuration.
        degrees: The plan.
        cluster: The hardware.
        policy: Bytes per element, and the numbers of matrix products.
        stack: The software stack.
        seconds: Measured seconds of a step.
        assumptions: What the row does not state and was assumed.
        lighter: Recompute flavours to try in order until the plan fits; empty if the row says which.
        lora: Adapters that are trained in place of the model; None for the model itself.
        first_layers: Layers of every stage, the first ones, that recompute; 0 for all.
    """

    row: Row
    family: str
    config: Config
    degrees: Degrees
    cluster: Cluster
    policy: DtypePolicy
    stack: Stack
    seconds: float
    assumptions: tuple[str, ...] = ()
    lighter: tuple[str, ...] = ()
    lora: Lora | None = None
    first_layers: int = 0

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts."""
        config = self.config
        if isinstance(config, DecoderConfig):
            return any(isinstance(block.mlp, Experts) for block in config.blocks)
        return isinstance(config, PublishedConfig) and config.experts > 0


class _Notes:
    """Assumptions made on the way."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def assume(self, what: str) -> None:
        self.made.append(what)


def express(row: Row) -> Case:
    """Return a row as a case.

    Raises:
        InexpressibleError: If it cannot be expressed; the message says why.
    """
    notes = _Notes()
    row, filled = complete(row)
    if not any((row.step_time_s, row.tokens_per_s_per_gpu, row.samples_per_s, row.tflops_per_gpu)):
        raise InexpressibleError("has no step time")
    notes.made += filled
    cluster = _cluster(row, notes)
    degrees, lighter = _degrees(row, notes)
    family, config = _model(row, degrees, notes)
    seconds = _seconds(row, config, notes)
    policy = _policy(row)
    stack = stack_for(row.framework or "", row.gpu or "", degrees.zero)
    if row.attention == "unfused":
        stack = replace(stack, attention="unfused")
    stack = _told(stack, row)
    if degrees.tp == 1 or not degrees.sequence_parallel:  # an all-reduce waits for the whole product
        stack = replace(stack, hides_tp=False)
    lora = read_lora(row.lora) if row.lora else None
    return Case(
        row, family, config, degrees, cluster, policy, stack, seconds, tuple(notes.made), lighter, lora,
        row.recompute_layers or 0,
    )  # fmt: skip


def _told(stack: Stack, row: Row) -> Stack:
    """Return a stack with the choices a row states: kernels and dispatch of experts, overlap, recompute, dropout."""
    names = (
        "dispatch", "hides_dispatch", "overlaps_shared", "hides_tp", "graphs", "experts", "dropout",
        "recompute_modules",
    )  # fmt: skip
    said = {name: getattr(row, name) for name in names}
    return replace(stack, **{name: value for name, value in said.items() if value is not None})


def _need(row: Row, *names: str) -> None:
    missing = [name for name in names if getattr(row, name) is None]
    if missing:
        raise InexpressibleError(f"does not state {', '.join(missing)}")


def _seconds(row: Row, config: Config, notes: _Notes) -> float:
    """Return the measured seconds of a step, from throughput if need be."""
    if row.step_time_s is not None:
        return row.step_time_s
    assert row.global_batch is not None
    assert row.n_gpus is not None
    if row.tokens_per_s_per_gpu and row.seq:
        notes.assume("seconds of a step: global batch x seq / (tokens/s of a device x devices)")
        return row.global_batch * row.seq / (row.tokens_per_s_per_gpu * row.n_gpus)
    if row.samples_per_s:
        notes.assume("seconds of a step: global batch / (samples/s)")
        return row.global_batch / row.samples_per_s
    if row.tflops_per_gpu and row.tflops_kind == "model":
        work = step_flops(config, row.global_batch, row.mtp_layers or 0)
        if work is not None:
            notes.assume("seconds of a step: operations as Megatron-LM counts them / (TFLOP/s of a device x devices)")
            return work / (row.tflops_per_gpu * 1e12 * row.n_gpus)
    raise InexpressibleError("has no step time")


# Hardware.

_DEVICES = (
    (r"A100.*40\s*GB", "a100-40"),
    (r"A100|Ampere", "a100"),
    (r"GH200", "gh200"),
    (r"H100.*96\s*GB", "h100-96"),
    (r"H100.*PCIe", "h100-pcie"),
    (r"H100", "h100"),
    (r"H200.*NVL", "h200-nvl"),
    (r"H200", "h200"),
    (r"H800", "h800"),
    (r"H20\b", "h20"),
    (r"GB200", "gb200"),
    (r"GB300", "gb300"),
    (r"B200", "b200"),
    (r"B300", "b300"),
    (r"V100.*16\s*GB", "v100-aws"),
    (r"V100", "v100"),
    (r"MI300", "mi300x"),
    (r"MI325", "mi325x"),
    (r"MI355", "mi355x"),
    (r"TPU[ -]v5p", "tpu-v5p"),
    (r"TPU[ -]v5e", "tpu-v5e"),
    (r"TPU[ -]v6e", "tpu-v6e"),
    (r"TPU[ -]v7x", "tpu-v7x"),
    (r"A10G", "a10g"),
    (r"L40S", "l40s"),
    (r"L20\b", "l20"),
    (r"L4\b", "l4"),
    (r"4090", "rtx4090"),
)
"""Pattern of a device's name and the preset it is priced by."""


def _cluster(row: Row, notes: _Notes) -> Cluster:
    _need(row, "gpu", "n_gpus")
    assert row.gpu is not None
    assert row.n_gpus is not None
    name = next((preset for pattern, preset in _DEVICES if re.search(pattern, row.gpu, re.IGNORECASE)), None)
    if name == "v100" and row.gpus_per_node == PRESETS["v100-dgx2"].devices_per_node:
        name = "v100-dgx2"
    if name is None:
        raise InexpressibleError(f"device {row.gpu!r} has no preset")
    cluster = PRESETS[name]
    if cluster.intra.torus:
        return cluster
    stated = row.inter or (row.intra if re.search("per node", row.intra or "") else "") or ""
    per_node = max(row.gpus_per_node or 1, cluster.devices_per_node)
    if row.n_gpus > per_node:  # of a rack as many devices are used as divide the job
        per_node = next(size for size in range(per_node, 0, -1) if row.n_gpus % size == 0)
    if per_node == cluster.devices_per_node and (row.n_gpus <= per_node or "not stated" in stated):
        return cluster
    cards = nics(stated)
    if cards is None:
        notes.assume(f"links between nodes as of preset {name}")
        known = cluster.inter.nics
        inter = cluster.inter if known is None else replace(cluster.inter, bandwidth=known.share(per_node))
    else:
        tier = cluster.inter.tier
        hosts = per_node // row.gpus_per_node if row.gpus_per_node and per_node % row.gpus_per_node == 0 else 1
        inter = networks.nics(tier, cards[0] * hosts, cards[1], per_node)
    return replace(cluster, devices_per_node=per_node, inter=inter)


def nics(text: str) -> tuple[int, float] | None:
    """Return number and Gb/s of a node's cards; None if the text does not say.

    Where cards for several purposes are listed, those for computing count.

    >>> nics("4x InfiniBand HDR 200Gb/s per node"), nics("1600Gbps node-node RoCE"), nics("NVL72")
    ((4, 200.0), (1, 1600.0), None)
    >>> nics("Storage: 2x ConnectX-7 IB NDR 400Gb/s, Compute: 8x ConnectX-7 IB NDR 400Gb/s")
    (8, 400.0)
    """
    text = text.partition("Compute:")[2] or text
    if found := re.search(r"(\d+)\s*x[^,;+]*?(\d+)\s*Gb", text):
        return int(found[1]), float(found[2])
    found = re.search(r"(\d+)\s*Gb", text)
    return (1, float(found[1])) if found else None


_FORMATS = (
    (r"fp4", r"", "nvfp4"),
    (r"mxfp8|^fp8-mx", r"", "mxfp8"),
    (r"subchannel only|blockwise|fp8-sc", r"", "fp8-block"),
    (r"fp8-cs|rowwise|tensorwise|full", r"", "fp8-current"),
    (r"int8", r"maxtext", "int8-current"),
    (r"fp8", r"torchtitan|megatron-bridge", "fp8-current"),
    (r"fp8", r"", "fp8"),
)
"""Pattern of a row's precision, of its framework, and the precision that is meant, first match first.

Where a table says fp8 and no more: torchtitan scales by a tensor's own maximum, and so do Megatron-Bridge's tables of
Hopper (NVIDIA-NeMo/Megatron-Bridge docs/performance-guide.md); older Transformer Engine by delayed scaling, and so does
MaxText on GPUs, whose `Fp8Quantization` is flax's `Fp8DirectDotGeneralOp`.
"""

_BFLOAT16_GRADIENTS = r"nemo|megatron-bridge|mlperf"
"""Frameworks that sum and reduce gradients in bfloat16 and, in fp8, keep and gather weights in it.

NeMo's plugins of precision have `grad_reduce_in_fp32=False` and `fp8_params=True`
(nemo/collections/llm/recipes/precision/mixed_precision.py).
"""

_FLOAT32_PARAMETERS = r"torchtitan|oneflow"
"""Frameworks that keep parameters in float32 and cast them where they are read.

Torchtitan shards float32 parameters (`mixed_precision_param = "bfloat16"` of FSDP2); OneFlow's automatic mixed
precision inserts casts behind float32 variables, and has no copy of its own.
"""


def _policy(row: Row) -> DtypePolicy:
    """Return what numbers are stored and multiplied in; training in 16 bits where the row does not say."""
    text, framework = (row.precision or "").lower(), (row.framework or "").lower()
    if "fp32" in text and "16" not in text:
        return POLICIES["fp32"]
    name = next(
        (name for own, whose, name in _FORMATS if re.search(own, text) and re.search(whose, framework)), "mixed"
    )
    if re.search(_BFLOAT16_GRADIENTS, framework):
        has_primary = name in ("fp8", "fp8-current", "mxfp8")
        name += ",weights=low,gradients=16,reduce=16" if has_primary else ",gradients=16,reduce=16"
    elif name == "mixed" and re.search(_FLOAT32_PARAMETERS, framework):
        name = "fsdp"
    elif name == "mixed" and "fp16" in text and "bf16" not in text:
        name = "megatron-fp16"
    elif name == "mixed" and "bf16" in text and "deepspeed" in framework and (row.pp or 1) > 1:
        name = "mixed,gradients=both"
    return load_policy(f"{name},{row.numbers}" if row.numbers else name)


# Degrees.

_SCHEDULES = (
    (r"zb-?1p|zb-?h1", "zb-h1"),
    (r"zb-?2p|zb-?h2", "zb-h2"),
    (r"zb-?v|zbv", "zb-v"),
    (r"gpipe", "gpipe"),
    (r"1f1b|^$", "1f1b"),
)
"""Pattern of a schedule's name and the schedule it is; of none stated 1F1B."""


def _degrees(row: Row, notes: _Notes) -> tuple[Degrees, tuple[str, ...]]:
    _need(row, "global_batch", "tp", "pp")
    tp, pp, cp, ep = row.tp or 1, row.pp or 1, row.cp or 1, row.ep or 1
    assert row.n_gpus is not None
    assert row.global_batch is not None
    dp = row.dp or row.n_gpus // (tp * pp * cp)
    if dp * tp * pp * cp != row.n_gpus:
        raise InexpressibleError(f"tp {tp} x pp {pp} x cp {cp} x dp {dp} are not {row.n_gpus} devices")
    # More groups than data- and context-parallel devices are only possible with whole experts.
    data = dp * cp
    divides = tp > 1 and ep % (cp * tp) == 0 and (data * tp) % ep == 0
    whole = divides and (row.etp == 1 or (row.etp is None and data % ep > 0))
    schedule = _schedule(row)
    recompute, lighter = _recompute(row, notes)
    zero, interleave = _zero(row), _interleave(row, pp, schedule, notes)
    shard = row.shard if zero and row.shard and row.shard < dp * cp else 0
    try:
        return (
            Degrees(
                dp=dp,
                tp=tp,
                pp=pp,
                cp=cp,
                ep=ep if whole else min(ep, data),
                etp=1 if whole else 0,
                zero=zero,
                shard=shard,
                sequence_parallel=_sequence_parallel(row, tp),
                recompute=recompute,
                schedule=schedule,
                interleave=interleave,
                microbatch=_microbatch(row, dp, pp, notes),
                global_batch=row.global_batch,
                layers=_stage_layers(row, pp * interleave),
            ),
            lighter,
        )
    except AutoparError as error:
        raise InexpressibleError(error.args[0]) from None


def _schedule(row: Row) -> str:
    text = (row.schedule or "").lower()
    name = next((schedule for pattern, schedule in _SCHEDULES if re.search(pattern, text)), None)
    if name is None or name not in SCHEDULES:
        raise InexpressibleError(f"schedule {row.schedule!r} is not known")
    return name


def _interleave(row: Row, pp: int, schedule: str, notes: _Notes) -> int:
    if pp == 1 or schedule != "1f1b":
        return 1
    if isinstance(row.vpp, int):
        return row.vpp
    if isinstance(row.vpp, str) and "max" in row.vpp:
        _need(row, "layers")
        assert row.layers is not None
        # where layers do not divide, the embedding and the head count as one each (zero-bubble)
        return max(1, (row.layers if row.layers % pp == 0 else row.layers + 2) // pp)
    if "interleave" in (row.schedule or "").lower() and "unknown" not in (row.schedule or ""):
        notes.assume("2 stages per group of devices")
        return 2
    return 1


_SPLITS_EVENLY = r"mega|nemo"
"""Frameworks that refuse a number of layers that their stages do not divide."""


def _stage_layers(row: Row, num_stages: int) -> tuple[int, ...]:
    """Return the layers of every stage; () for an even cut.

    Megatron-Core counts the embedding and the head as a layer each if it is told to, and refuses layers that its stages
    do not divide: such a row was told to.
    """
    if num_stages == 1:
        return ()
    if row.stage_layers is not None:
        return row.stage_layers
    if row.layers is None or not re.search(_SPLITS_EVENLY, row.framework or "", re.IGNORECASE):
        return ()
    if (row.schedule or "").lower() not in ("", "1f1b"):
        return ()
    per_stage, rest = divmod(row.layers + 2, num_stages)
    counted = all(str(end) == "True" for end in (row.as_published or {}).get("asym_pp", ("",)))
    if rest or not (counted or row.layers % num_stages):
        return ()
    return (per_stage - 1, *(per_stage,) * (num_stages - 2), per_stage - 1)


def _microbatch(row: Row, dp: int, pp: int, notes: _Notes) -> int:
    assert row.global_batch is not None
    if row.micro_batch is not None:
        return row.micro_batch
    if row.num_microbatches is not None:
        return max(1, row.global_batch // (dp * row.num_microbatches))
    share = row.global_batch // dp
    size = 1 if pp > 1 else next((size for size in range(min(16, share), 0, -1) if share % size == 0), 1)
    notes.assume(f"microbatches of {size}")
    return size


def _zero(row: Row) -> int:
    if row.zero == 3 and (row.pp or 1) > 1 and re.search("torchtitan", row.framework or "", re.IGNORECASE):
        # Under a pipeline FSDP2 keeps parameters gathered and reduces gradients with the last microbatch
        # (torchtitan, `fsdp_reshard_after_forward` "default"; torch, `PipelineStage`): states alone are shared, as in
        # ZeRO-1.
        return 1
    if isinstance(row.zero, int):
        # Megatron's descendants add up gradients where they are and reduce them once per step, as with ZeRO-1.
        return 1 if row.zero == 2 and re.search("mega", row.framework or "", re.IGNORECASE) else row.zero
    text = (row.zero or "").lower()
    if found := re.search(r"zero-?(\d)", text):
        return int(found[1])
    if "fsdp" in text:
        return 3
    return 1 if "distributed optimizer" in text else 0


def _sequence_parallel(row: Row, tp: int) -> bool:
    """Return whether sequence parallelism is on; frameworks from Megatron-Core on use it with every tp."""
    if tp == 1:
        return False
    if row.sequence_parallel is not None:
        return row.sequence_parallel
    return bool(re.search(r"megatron-(core|bridge)|nemo|megascale|torchtitan", row.framework or "", re.IGNORECASE))


def _recompute(row: Row, notes: _Notes) -> tuple[str, tuple[str, ...]]:
    text = (row.recompute or "").lower()
    if row.offload:
        return "offload", ()
    if not text:
        notes.assume("the least recompute that fits")
        return "none", ("selective", "full")
    if "select" in text or "minimal" in text:
        return "selective", ()
    if "offload" in text:
        return "offload", ()
    return ("full", ()) if "full" in text else ("none", ())


# Models.

_VOCABULARIES = (("bert", 30522), ("gpt", 50257), ("llama2", 32000), ("llama3", 128256), ("mixtral", 32000))
_SEQUENCES = ((r"megatron-lm 2020", 1024),)
"""Tokens per sequence by framework, where its rows do not say: Shoeybi et al. 2019 (Megatron-LM) train with 1024."""


_PUBLISHED = (
    (r"deepseek-?v3", "deepseek-v3"),
    (r"kimi[ _-]?k2", "kimi-k2"),
    (r"qwen3-235b", "qwen3-235b-a22b"),
    (r"qwen3-30b", "qwen3-30b-a3b"),
    (r"gpt-?oss-?\s?120b", "gpt-oss-120b"),
    (r"gpt-?oss-?\s?20b", "gpt-oss-20b"),
    (r"llama-?4 maverick", "llama4-maverick"),
    (r"llama-?4 scout", "llama4-scout"),
    (r"nemotron-?4-15b", "nemotron4-15b"),
    (r"nemotron-?4-340b", "nemotron4-340b"),
    (r"nemotron-?h-56b", "nemotron-h-56b"),
    (r"nemotron[ _-]?(v3|3)[ _-]nano", "nemotron3-nano-30b-a3b"),
)
"""Pattern of a model's name, and the published configuration that is meant; sizes a row states must be those."""
_STATED = {
    "hidden": "hidden", "heads": "heads", "kv_heads": "kv_heads", "num_experts": "experts",
    "topk": "top_k", "moe_ffn": "expert_ffn",
}  # fmt: skip
"""Fields of a row, and sizes of a published configuration."""


def _published(row: Row, degrees: Degrees, notes: _Notes) -> Model | None:
    """Return the published model that a row names; None if it names none.

    Raises:
        InexpressibleError: If the row states other sizes: which layers have experts is then unknown.
    """
    name = next((zoo for pattern, zoo in _PUBLISHED if re.search(pattern, row.model or "", re.IGNORECASE)), None)
    if name is None:
        return None
    config = models.spec(name).config
    if row.layers is not None and row.layers != config.num_layers:
        config = _proxy(name, config, row)
    for own, size in _STATED.items():
        stated, known = getattr(row, own), getattr(config, size)
        if stated is not None and known and stated != known:
            raise InexpressibleError(f"states {own} {stated}, where {name} has {known}")
    assert isinstance(config, PublishedConfig), name
    vocab = _padded(config.vocab, degrees.tp)
    notes.assume(f"the published configuration of {name}")
    return "published", replace(config, seq=_sequence(row, notes), vocab=vocab, mtp=row.mtp_layers or 0)


def _proxy(name: str, config: Config, row: Row) -> Config:
    """Return a published configuration with the fewer layers that a row states.

    Raises:
        InexpressibleError: If layers differ and the row does not say which are left, or it states more.
    """
    assert isinstance(config, PublishedConfig), name
    assert row.layers is not None
    alike = not config.dense_layers and not config.scan_heads and "llama4" not in name
    if row.layers > config.num_layers or not (alike or row.dense_layers is not None):
        raise InexpressibleError(f"states layers {row.layers}, where {name} has {config.num_layers}")
    return replace(config, num_layers=row.layers, dense_layers=row.dense_layers or 0)


def _model(row: Row, degrees: Degrees, notes: _Notes) -> Model:
    """Return family and configuration; the vocabulary is padded as Megatron-LM does, so that it can be split."""
    published = _published(row, degrees, notes)
    if published is not None:
        return published
    arch = (row.arch or "").lower()
    _need(row, "layers", "hidden", "heads")
    assert row.layers is not None
    assert row.hidden is not None
    assert row.heads is not None
    heads, kv_heads = row.heads, row.kv_heads or row.heads
    vocab, seq = _padded(_vocabulary(row, notes), degrees.tp), _sequence(row, notes)
    try:
        if "mla" in arch or "hybrid" in arch or "nemotron" in arch or arch in ("t5", "wresnet"):
            raise InexpressibleError(f"the zoo has no family for {row.arch!r}")
        if row.num_experts:
            ffn = row.moe_ffn or row.ffn
            if ffn is None:
                raise InexpressibleError("does not state ffn")
            attention = Attention(
                heads,
                kv_heads,
                row.head_dim or row.hidden // heads,
                rope=Rope(1e4, row.head_dim or row.hidden // heads),
            )
            experts = Experts(row.num_experts, row.topk or 2, ffn)
            return "decoder", uniform(
                row.layers, attention, experts, hidden=row.hidden, seq=seq, vocab=vocab, norm=Norm("rms", 1e-5),
                arrangement="pre", names=LLAMA,
            )  # fmt: skip
        if "llama" in arch:
            _need(row, "ffn")
            assert row.ffn is not None
            return "llama", LlamaConfig(row.layers, row.hidden, heads, kv_heads, row.ffn, seq, vocab, 5e5)
        if arch.startswith(("gpt", "bert")):
            if kv_heads != heads or row.ffn not in (None, 4 * row.hidden):
                raise InexpressibleError(
                    "the zoo's GPT and BERT have as many heads of keys and an MLP four times as wide"
                )
            if arch.startswith("bert"):
                return "bert", BertConfig(row.layers, row.hidden, heads, seq, vocab)
            # a pipeline has a copy of the embedding at either end, which is what an untied head amounts to
            return "gpt", GptConfig(row.layers, row.hidden, heads, seq, vocab, tied=False, bias="no bias" not in arch)
    except AutoparError as error:
        raise InexpressibleError(error.args[0]) from None
    raise InexpressibleError(f"the zoo has no family for {row.arch!r}")


def _padded(vocab: int, tp: int) -> int:
    """Return a vocabulary padded to a multiple of 128 x tp.

    >>> _padded(50257, 8)
    51200
    """
    return -(-vocab // (128 * tp)) * 128 * tp


def _vocabulary(row: Row, notes: _Notes) -> int:
    if row.vocab is not None:
        return row.vocab
    text = re.sub(r"[ ._-]", "", f"{row.model or ''} {row.arch or ''}".lower())
    vocab = next((size for name, size in _VOCABULARIES if name in text), 50257)
    notes.assume(f"a vocabulary of {vocab}")
    return vocab


def _sequence(row: Row, notes: _Notes) -> int:
    if row.seq is not None:
        return row.seq
    for pattern, seq in _SEQUENCES:
        if re.search(pattern, (row.framework or "").lower()):
            notes.assume(f"sequences of {seq}")
            return seq
    raise InexpressibleError("does not state seq")

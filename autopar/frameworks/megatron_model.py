"""The model that arguments of Megatron-LM state, as one of the zoo's families with these sizes."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Protocol

from autopar import models
from autopar.errors import ExportError
from autopar.frameworks.megatron import DIVISIBLE_BY
from autopar.models.mixtral import MixtralConfig
from autopar.models.spec import Config, ModelSpec

_BASES = {"gpt": "gpt3-175b", "llama": "llama3-8b", "mixtral": "mixtral-8x7b"}
"""Entry of the zoo that a family's sizes are stated against, if no entry has them."""
_OTHER_MODELS = (
    "--multi-latent-attention",
    "--mtp-num-layers",
    "--moe-shared-expert-intermediate-size",
    "--moe-layer-freq",
    "--heterogeneous-layers-config-path",
    "--encoder-num-layers",
    "--is-hybrid-model",
    "--squared-relu",
    "--quick-geglu",
)
"""Arguments that make a model that no family of the zoo is."""
_EXPORT = "export the model and give --model model.onnx"


class Stated(Protocol):
    """Arguments that are read one by one."""

    def whole(self, name: str) -> int | None:
        """Return a whole number from 1 on, None if it is not there."""

    def flag(self, name: str) -> bool:
        """Return whether an argument is there."""

    def text(self, name: str) -> str | bool | None:
        """Return what follows an argument, True if nothing does, None if it is not there."""

    def peek(self, name: str) -> str | bool | None:
        """Return what follows an argument that stays ignored."""


def vocabulary_multiple(arguments: Stated, tp: int) -> int:
    """Return the number of tokens that Megatron-LM pads a vocabulary to a multiple of."""
    return (arguments.whole("--make-vocab-size-divisible-by") or DIVISIBLE_BY) * tp


def read_model(arguments: Stated, multiple: int, assumed: list[str]) -> tuple[str, Mapping[str, int]]:
    """Return a model of the zoo and the fields of its configuration that the arguments state otherwise.

    Args:
        arguments: The arguments.
        multiple: What the vocabulary is padded to a multiple of.
        assumed: Receives what the model has otherwise than the arguments say, a sentence each.

    Raises:
        ExportError: If sizes are missing, or no family of the zoo is such a model.
    """
    needed = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length")
    sizes = [arguments.whole(name) for name in needed]
    if None in sizes:
        missing = ", ".join(name for name, size in zip(needed, sizes, strict=True) if size is None)
        raise ExportError(f"the sizes of the model are not stated: {missing}", hint="give --model")
    layers, hidden, heads, seq = (int(size or 0) for size in sizes)
    _check_kind(arguments, hidden, heads)
    gated, experts = arguments.flag("--swiglu"), arguments.whole("--num-experts")
    family = "mixtral" if experts else "llama" if gated else "gpt"
    if experts and not gated:
        raise ExportError("experts without --swiglu; those of the zoo are gated", hint=_EXPORT)
    dims = {"num_layers": layers, "hidden": hidden, "heads": heads, "seq": seq}
    dims["vocab"] = _vocabulary(arguments, models.spec(_BASES[family]), multiple, assumed)
    arguments.whole("--max-position-embeddings")
    # The default of the gated width keeps the parameters of 4 x hidden; a multiple of 64.
    default = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    dense = arguments.whole("--ffn-hidden-size")
    ffn = (arguments.whole("--moe-ffn-hidden-size") if experts else None) or dense or default
    groups = heads
    if arguments.flag("--group-query-attention"):
        groups = arguments.whole("--num-query-groups") or 1
    bias = not arguments.flag("--disable-bias-linear")
    tied = not arguments.flag("--untie-embeddings-and-output-weights")
    if family == "gpt":
        if ffn != 4 * hidden:
            raise ExportError(f"an MLP of width {ffn} without --swiglu; the zoo's is {4 * hidden} wide", hint=_EXPORT)
        if groups != heads:
            raise ExportError(f"{groups} key-value heads of {heads} without --swiglu; GPT has as many", hint=_EXPORT)
        dims |= {"tied": int(tied), "bias": int(bias)}
    else:
        dims |= {"kv_heads": groups, "ffn": ffn}
        if bias:
            assumed.append("linear layers have no biases; Megatron-LM's have without --disable-bias-linear")
        if tied:
            more = dims["vocab"] * hidden
            assumed.append(
                f"the head is a matrix of its own, {more:,} parameters; Megatron-LM shares the embedding without "
                "--untie-embeddings-and-output-weights"
            )
        arguments.whole("--rotary-base")  # another base takes as long
    if experts:
        arguments.flag("--moe-grouped-gemm")  # as experts are a batched product here
        dims |= {"experts": experts, "top_k": arguments.whole("--moe-router-topk") or 2}
        _capacity(arguments, assumed)
    _layers(arguments, family, assumed)
    entry, config = models.configured(_BASES[family], dims)
    entry = models.published(family, config) or entry
    return f"zoo:{entry.name}", _changed(entry, config)


def _capacity(arguments: Stated, assumed: list[str]) -> None:
    """Add that experts take more or fewer tokens than the arguments say."""
    stated = arguments.text("--moe-expert-capacity-factor")
    arguments.flag("--moe-pad-expert-input-to-capacity")
    arguments.text("--moe-token-drop-policy")
    config = models.spec(_BASES["mixtral"]).config
    assert isinstance(config, MixtralConfig), "it is the family's base"
    usual = config.capacity_factor
    if stated is None:
        assumed.append(
            f"an expert takes {usual:g} times an even share of tokens; Megatron-LM drops none unless told to"
        )
    elif str(stated) != f"{usual:g}":
        assumed.append(f"an expert takes {usual:g} times an even share of tokens, not {stated}")


def _check_kind(arguments: Stated, hidden: int, heads: int) -> None:
    """Refuse models that no family of the zoo is."""
    for name in _OTHER_MODELS:
        value = arguments.peek(name)
        if value is not None and not (name == "--moe-layer-freq" and value == "1"):
            raise ExportError(
                f"{name} makes a model that is not in the zoo",
                hint=_EXPORT if name != "--mtp-num-layers" else "give --model, such as zoo:deepseek-v3",
            )
    size = arguments.whole("--kv-channels")
    if size is not None and size * heads != hidden:
        raise ExportError(
            f"--kv-channels {size} with {heads} heads and --hidden-size {hidden}; heads of the zoo's models are "
            f"{hidden // heads} wide then",
            hint=_EXPORT,
        )


def _vocabulary(arguments: Stated, base: ModelSpec, multiple: int, assumed: list[str]) -> int:
    """Return the tokens of the vocabulary, padded as Megatron-LM pads them."""
    vocab = arguments.whole("--vocab-size")
    if vocab is None:
        vocab = int(getattr(base.config, "vocab", 0))
        assumed.append(f"a vocabulary of {vocab}; the tokenizer that Megatron-LM asks is not in the arguments")
    return -(-vocab // multiple) * multiple


def _layers(arguments: Stated, family: str, assumed: list[str]) -> None:
    """Add what layers of the zoo have otherwise than the arguments say: norms, positions, dropout."""
    arguments.flag("--no-create-attention-mask-in-dataloader")  # masks are no data here
    rope = arguments.flag("--use-rotary-position-embeddings")
    given = "rope" if rope else arguments.text("--position-embedding-type") or "learned_absolute"
    wanted = "learned_absolute" if family == "gpt" else "rope"
    if given != wanted:
        assumed.append(f"positions are {wanted}; Megatron-LM's are {given} by these arguments")
    norm, usual = arguments.text("--normalization") or "LayerNorm", "LayerNorm" if family == "gpt" else "RMSNorm"
    if norm != usual:
        assumed.append(f"norms are {usual}; Megatron-LM's are {norm} by these arguments")
    rates = {name: arguments.peek(name) or "0.1" for name in ("--hidden-dropout", "--attention-dropout")}
    dropped = [f"{name} {rate}" for name, rate in rates.items() if not _is_zero(rate)]
    for name, rate in rates.items():
        if _is_zero(rate):
            arguments.text(name)
    if dropped:
        assumed.append(f"no dropout; Megatron-LM runs {' and '.join(dropped)}")


def _is_zero(rate: str | bool) -> bool:
    return isinstance(rate, str) and not rate.strip("0.")


def _changed(entry: ModelSpec, config: Config) -> dict[str, int]:
    """Return the fields of a configuration that differ from those of a zoo entry."""
    names = [field.name for field in fields(config)]
    return {name: int(getattr(config, name)) for name in names if getattr(config, name) != getattr(entry.config, name)}

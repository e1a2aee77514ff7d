"""Hugging Face configurations as ONNX models: a local `config.json`, no weights, no network."""

import hashlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar import models
from autopar.errors import AutoparError, ModelError, PlanError
from autopar.escaping import one_line
from autopar.limits import MAX_LAYERS, MAX_SIZE
from autopar.models.architectures import READERS, missing_sizes
from autopar.models.decoder_config import DecoderConfig
from autopar.models.decoder_settings import with_settings
from autopar.models.dual_encoder_reader import TEXT_LENGTHS
from autopar.plan import DimSize
from autopar.reading import UnreadableError, parse_json
from autopar.torch_experts import exports_experts
from autopar.torch_export import to_onnx
from autopar.writing import write_atomically

if TYPE_CHECKING:
    import onnx

_NEEDED = ("torch", "onnxscript", "transformers")
FOLDER = "huggingface"
"""Folder of the cache."""
_VERSION = 2
"""Of what is done to a model on the way; a new one makes cached files useless."""
_SAMPLES = 2
_LONGEST = 4096
"""Tokens per sequence unless said otherwise, if the model takes as many."""
_LENGTHS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len", "seq_length")
"""Fields that state the tokens a model takes, the first that is there."""
_LARGE = 1 << 22
"""Elements from which on a tensor is made without memory."""
_ATTENTION = "autopar"
_MOST_TOKENS = 10_000_000
"""Tokens of an example; two of them take 160 MB."""
_SHOWN = 300
"""Characters of a reason that a message shows."""
_SIZE = re.compile(r"^(num|n)_|_(size|dim|layers?|heads?|positions|embeddings)$|^d_(model|ff|kv)$")
"""Names of fields that hold a size."""
_WHOLE = {
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 0),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "vocab_size", "num_channels", "patch_size", "image_size"), 1),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "num_attention_heads", "n_head", "num_heads"), 1),
}
"""Fields that are whole numbers, or lists of them, with the least that makes a model."""
_UNSET = -1
"""What some families write for a size that is not set."""
_BEHIND_PADDING = ("roberta", "xlm-roberta")
"""Families whose tables of positions begin with rows that only padding uses."""
DOCUMENTS, IMBALANCE, PREDICTIONS, CACHED = "docs_per_sequence", "expert_imbalance", "mtp", "cached"
SETTINGS = ("seq", DOCUMENTS, IMBALANCE, PREDICTIONS, CACHED)
"""What `--set` may name on such a model."""
_OPTIONAL = (PREDICTIONS, CACHED)
"""Settings that may be 0."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
"""Fields in which configurations state the experts of a layer."""
_ZOO_SIZES = {
    "num_layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads", "num_attention_heads"),
    "ffn": ("moe_intermediate_size", "intermediate_size"),
    "vocab": ("vocab_size",),
    "top_k": ("num_experts_per_tok", "num_experts_per_token"),
}
"""Fields of the zoo's mixtures of experts, and the fields of configurations that state them."""


def read_config(source: str | Path) -> dict[str, Any]:
    """Return a configuration.

    Args:
        source: A `config.json`, or a folder with one.

    Raises:
        ModelError: If it is not there, no JSON, or not of a model.
    """
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    try:
        config = parse_json(path.read_bytes(), foreign=True)
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read: {error.strerror}", hint="give hf:FOLDER or hf:config.json on this machine"
        ) from None
    except UnreadableError as error:
        raise ModelError(f"{path} is no JSON: {error}", hint="download the config.json of the model again") from None
    if isinstance(config, dict) and "_class_name" in config:  # as diffusers calls it
        config.setdefault("model_type", config["_class_name"])
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelError(
            f"{path} has no model_type", hint="give the config.json of a model of transformers or diffusers"
        )
    _check(config, path)
    return config


def _check(config: Mapping[str, Any], path: Path) -> None:
    """Check what transformers takes as it is, and then loops over, divides by or calls.

    Raises:
        ModelError: If a field is not what it has to be; the message names it.
    """
    hint = "give the config.json of a transformers model"
    names = config.get("architectures")
    if not isinstance(config["model_type"], str):
        raise ModelError(f"{path}: model_type is {config['model_type']!r}, not a name", hint=hint)
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ModelError(f"{path}: architectures is {names!r}, not a list of names", hint=hint)
    for name, value in config.items():
        if value is None or not (name in _WHOLE or _SIZE.search(name)):
            continue
        least, most = _WHOLE.get(name, _UNSET), MAX_LAYERS if name.endswith(("layers", "layer")) else MAX_SIZE
        for size in value if isinstance(value, list) else [value]:
            is_whole = isinstance(size, int) and not isinstance(size, bool)
            if (is_whole and not least <= size <= most) or (name in _WHOLE and not is_whole):
                raise ModelError(f"{path}: {name} is {size!r}", hint=f"it is a whole number from {least} to {most}")
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(groups, int) and (not groups or heads % groups):
        raise ModelError(
            f"{path}: num_attention_heads {heads} is not divisible by num_key_value_heads {groups}",
            hint="heads share keys and values in equal groups",
        )


def default_seq(config: Mapping[str, Any]) -> int:
    """Return the tokens per sequence a model is exported with if nobody says.

    Raises:
        ModelError: If the configuration states a longest sequence that is no number of tokens.
    """
    text = config.get("text_config")
    config = {**(text if isinstance(text, dict) else {}), **config}
    name = next((name for name in _LENGTHS if config.get(name)), "")
    longest = config[name] if name else TEXT_LENGTHS.get(config["model_type"], _LONGEST)
    if not isinstance(longest, int) or isinstance(longest, bool) or longest < 1:
        raise ModelError(f"{name} of the configuration is {longest!r}", hint="it is a whole number of tokens, from 1")
    padding = config.get("pad_token_id", 1)
    if config["model_type"] in _BEHIND_PADDING and isinstance(padding, int):
        longest = max(1, longest - padding - 1)
    return min(_LONGEST, longest)


def build(
    source: str | Path, settings: Mapping[str, DimSize], cache_dir: str | Path | None = None
) -> "Path | onnx.ModelProto":
    """Return the ONNX model of a configuration: a file of the cache, written when it is first asked for.

    Args:
        source: A `config.json`, or a folder with one.
        settings: `seq`: tokens per sequence; `docs_per_sequence`: documents that share one, of equal length;
            `expert_imbalance`: tokens of the fullest device, relative to an even load of experts; `mtp`: further tokens
            that are predicted in training; `cached`: tokens before the sequence, of one token then unless set, whose
            keys and values lie in caches.
        cache_dir: Folder of the cache; None to keep nothing and return the model itself.

    Raises:
        ModelError: If the configuration is wrong, its family unknown, or a package missing.
    """
    config = read_config(source)
    sizes: dict[str, int] = {}
    imbalance = 1.0
    for name, value in settings.items():
        if name == IMBALANCE and isinstance(value, int | float):
            imbalance = float(value)
        elif name in SETTINGS and not isinstance(value, float | tuple) and value >= (name not in _OPTIONAL):
            sizes[name] = int(value)
        else:
            raise ModelError(
                f"{name}={value} cannot be set on a Hugging Face model",
                hint="--set seq=2048, tokens per sequence, or --set docs_per_sequence=4",
            )
    cached = sizes.get(CACHED, 0)
    seq = sizes.get("seq") or (1 if cached else default_seq(config))
    native = models.read_architecture(config, cached + seq)
    documents = sizes.get(DOCUMENTS, 1)
    if not isinstance(native, models.Unbuilt):
        _check_stated(config, cached + seq)
        if isinstance(native, DecoderConfig):
            native = with_settings(native, documents, imbalance, sizes.get(PREDICTIONS, 0), cached)
        else:
            _refuse(settings, f"a model of type {config['model_type']}: it is no decoder of text alone")
        if "seq" in sizes and native.sample_size != seq:
            raise ModelError(
                f"seq={seq} cannot be set on {config['model_type']}, which takes images",
                hint="correct image_size in its config.json for images of another size",
            )
        return models.build_architecture(str(config["model_type"]), native)
    _refuse(settings, "a model that PyTorch exports: its sequences are whole, and the load of its experts is even")
    if not exports_experts(str(config["model_type"])):
        check_dense(config, seq)
    if seq > _MOST_TOKENS:
        raise ModelError(f"seq={seq} is more than PyTorch can trace", hint=f"--set seq={_MOST_TOKENS}, or less")
    _check_exportable(native)
    if cache_dir is None:
        return _exported(config, seq, native)
    made_by = [_VERSION, seq, *(version(name) for name in _NEEDED)]
    key = hashlib.sha256(json.dumps([config, made_by], sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(cache_dir) / FOLDER
    for path in folder.glob(f"{key}-*.onnx"):
        if path == folder / _file_name(key, path.read_bytes()):  # else it is damaged, and made again
            return path
    model = _exported(config, seq, native)
    data = model.SerializeToString(deterministic=True)
    path = folder / _file_name(key, data)
    try:
        write_atomically(path, data)
    except PlanError:  # a full or read-only disk costs no more than the export next time
        return model
    return path


def _check_stated(config: Mapping[str, Any], seq: int) -> None:
    """Refuse a configuration without the sizes of its model: defaults would make another one.

    Raises:
        ModelError: If it lacks some; the message names them.
    """
    missing = missing_sizes(config, seq)
    if missing:
        named = ", ".join(f"{name} (by default {value})" for name, value in missing.items())
        raise ModelError(
            f"the configuration of type {config['model_type']} does not state {named}",
            hint="download the config.json of the model again, or add the field",
        )


def _exported(config: dict[str, Any], seq: int, native: models.Unbuilt) -> "onnx.ModelProto":
    """Return what PyTorch exports.

    Raises:
        ModelError: If it cannot, with the reason why there is no builder if the type has one.
    """
    try:
        return _model(config, seq)
    except ModelError as error:
        if config["model_type"] not in READERS:
            raise
        raise ModelError(f"autopar has no builder for {native.reason}, and {error.args[0]}", hint=error.hint) from error


def _refuse(settings: Mapping[str, DimSize], what: str) -> None:
    """Refuse settings of decoders on another model.

    Raises:
        ModelError: If there are some.
    """
    for name in settings.keys() & {DOCUMENTS, IMBALANCE, PREDICTIONS, CACHED}:
        raise ModelError(f"{name} cannot be set on {what}", hint=f"leave {name} out")


def _file_name(key: str, data: bytes) -> str:
    """Return the name of a cached model: what it was made from, and the hash of its content."""
    return f"{key}-{hashlib.sha256(data).hexdigest()[:16]}.onnx"


def _check_exportable(native: models.Unbuilt) -> None:
    """Refuse a model that only PyTorch can export where PyTorch, or what its export needs, is missing.

    Raises:
        ModelError: If a package is missing.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise ModelError(
            f"autopar has no builder for {native.reason}; exporting it needs {', '.join(missing)}, which is not "
            "installed",
            hint='pip install "autopar[torch]"',
        )


def check_dense(config: Mapping[str, Any], seq: int) -> None:
    """Refuse mixtures of experts that do not run by transformers' interface: their export does not say how they run.

    The form that can be traced gathers the weights of its experts for every token, and the others run each expert on
    all tokens or in a loop over data: time and memory of the graph are not those of any framework.

    Args:
        config: The configuration.
        seq: Tokens per sequence, for the hint.

    Raises:
        ModelError: If it states more than one expert; the hint has the nearest model of the zoo.
    """
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    for part in parts:
        experts = next((part[name] for name in _EXPERTS if isinstance(part.get(name), int) and part[name] > 1), 0)
        if not experts:
            continue
        sizes = {
            name: next((part[key] for key in keys if isinstance(part.get(key), int)), None)
            for name, keys in _ZOO_SIZES.items()
        }
        stated = {**{name: size for name, size in sizes.items() if size}, "experts": experts, "seq": seq}
        settings = " ".join(f"--set {name}={size}" for name, size in stated.items())
        shared = "deepseek-moe-16b" if part.get("n_shared_experts") else "mixtral-8x7b"
        raise ModelError(
            f"{config['model_type']} is a mixture of {experts} experts: its export copies the weights of experts for "
            "every token, or runs all experts on all tokens, so that its costs say nothing",
            hint=f"zoo:{shared} {settings} is the nearest model, with experts as one product that can be dealt out",
        )


def _model(config: dict[str, Any], seq: int) -> "onnx.ModelProto":
    with _border(config):
        module = _module(config)
        return to_onnx(module, _inputs(module, seq))


@contextmanager
def _border(config: Mapping[str, Any]) -> Iterator[None]:
    """Turn what transformers and PyTorch raise into one error, and keep their remarks to themselves.

    A configuration is run by the code of its family, of which there are hundreds: what it raises on a field that it
    does not take can be anything.

    Raises:
        ModelError: If the configuration cannot be made a model of; the message has the reason, and the fields that
            have a value which it names.
    """
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except AutoparError:
        raise
    except Exception as error:
        reason = one_line(" ".join(f"{type(error).__name__}: {error}".split()))[:_SHOWN]
        named = [name for name, value in config.items() if isinstance(value, str) and repr(value) in reason]
        fields = f" ({', '.join(map(one_line, named))})" if named else ""
        raise ModelError(
            f"transformers {transformers.__version__} cannot make a model of this {config['model_type']!r} "
            f"configuration{fields}: {reason}",
            hint="compare the field with the config.json that was published with the model",
        ) from error
    finally:
        transformers.logging.set_verbosity(level)


def _module(config: dict[str, Any]) -> Any:
    """Return the model without memory for its large weights."""
    import transformers

    try:
        known = transformers.AutoConfig.for_model(**config)
    except ValueError as error:
        raise ModelError(
            f"transformers {transformers.__version__} does not know models of type {config['model_type']!r}",
            hint="pip install -U transformers, or export the module with autopar.from_torch; "
            f"built without transformers are {', '.join(READERS)}",
        ) from error
    _register()
    known.use_cache = False
    known._attn_implementation = _ATTENTION
    names = config.get("architectures") or []
    kind = getattr(transformers, names[0], None) if names else None
    if kind is not None and not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise ModelError(f"architectures: {names[0]!r} is no model of transformers", hint="name a class of models")
    with _without_memory():
        if kind is not None:
            return kind(known)
        return transformers.AutoModelForCausalLM.from_config(known, attn_implementation=_ATTENTION)


def _inputs(module: Any, seq: int) -> dict[str, Any]:
    """Return example inputs for a model.

    Raises:
        ModelError: If it takes neither tokens nor images.
    """
    import torch

    name, config = module.main_input_name, module.config
    if name == "pixel_values":
        size = config.image_size
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        return {name: torch.zeros(_SAMPLES, config.num_channels, height, width)}
    if name != "input_ids":
        raise ModelError(
            f"{type(module).__name__} takes {name}, for which there is no example",
            hint="export the module with autopar.from_torch(module, inputs, 'model.onnx')",
        )
    tokens = torch.ones(_SAMPLES, seq, dtype=torch.int64)
    return {name: tokens, "decoder_input_ids": tokens} if config.is_encoder_decoder else {name: tokens}


@contextmanager
def _without_memory() -> Iterator[None]:
    """Make large tensors on the `meta` device, and small ones, such as tables of frequencies, as they are."""
    import torch
    from torch.overrides import TorchFunctionMode

    factories = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}

    class Large(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if func in factories and kwargs.get("device") is None:
                sizes = args[0] if args and isinstance(args[0], (tuple, list)) else args
                if prod(size for size in sizes if isinstance(size, int)) >= _LARGE:
                    kwargs["device"] = "meta"
            return func(*args, **kwargs)

    with Large():
        yield


def _register() -> None:
    """Teach transformers an attention that is exported as one op; grouped heads and causal masks stay attributes."""
    import torch
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    def attention(
        module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float | None = None, **others: Any
    ) -> tuple[Any, None]:
        causal = others.get("is_causal")
        result = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            scale=scaling,
            is_causal=mask is None and bool(getattr(module, "is_causal", False) if causal is None else causal),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return result.transpose(1, 2).contiguous(), None

    AttentionInterface.register(_ATTENTION, attention)
    AttentionMaskInterface.register(_ATTENTION, lambda *args, **kwargs: None)

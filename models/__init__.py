"""The zoo: ONNX graphs of published models, built in memory without their weights.

Adding a family is a file with `SPECS` and `build(name, config)`, and a line in each of the two tables below.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, asdict, fields, replace
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import ModelError
from autopar.limits import MAX_LAYERS, MAX_SIZE
from autopar.models import (
    bert,
    decoder,
    deepseek,
    dit,
    flux,
    gpt,
    llama,
    mixtral,
    mlp,
    published_decoders,
    resnet,
    sd3,
    unet,
    vit,
    wan,
)
from autopar.models.architectures import build_architecture, read_architecture
from autopar.models.config_fields import Unbuilt
from autopar.models.spec import Config, ModelSpec
from autopar.models.values import initial_values, num_parameters
from autopar.writing import write_atomically

if TYPE_CHECKING:
    import onnx

__all__ = [
    "Config", "ModelSpec", "Unbuilt", "build", "build_architecture", "build_config", "configured", "initial_values",
    "missing_model", "name_of", "names", "num_parameters", "published", "read_architecture", "save", "sizes_of", "spec",
]  # fmt: skip

CONFIG_KEY = "autopar.config"
"""Model metadata: the family and the configuration that a graph of the zoo was built from, as JSON."""
_LAYERS = "num_layers"
_NO_SIZES = ("seq", "image_size", "rope_theta", "docs_per_sequence", "expert_imbalance", "mtp", "cached")
"""Fields at any value of which a model keeps its name: the size of a sample, the base of the rotary frequencies, what
training adds to the model."""

FAMILIES: "Mapping[str, Callable[[str, Any], onnx.ModelProto]]" = {
    "gpt": gpt.build,
    "llama": llama.build,
    "bert": bert.build,
    "decoder": decoder.build,
    "published": published_decoders.build,
    "mixtral": mixtral.build,
    "deepseek": deepseek.build,
    "vit": vit.build,
    "resnet": resnet.build,
    "unet": unet.build,
    "flux": flux.build,
    "wan": wan.build,
    "dit": dit.build,
    "sd3": sd3.build,
    "mlp": mlp.build,
}
"""Builder of each family; it takes the name of the graph and the family's own `Config`."""

MODELS: Mapping[str, ModelSpec] = {
    item.name: item
    for item in (
        *gpt.SPECS,
        *llama.SPECS,
        *bert.SPECS,
        *mixtral.SPECS,
        *deepseek.SPECS,
        *published_decoders.SPECS,
        *vit.SPECS,
        *resnet.SPECS,
        *unet.SPECS,
        *flux.SPECS,
        *wan.SPECS,
        *dit.SPECS,
        *sd3.SPECS,
        *mlp.SPECS,
    )
}
"""Every model by name."""

_COUNTS = ("num_layers", "blocks", "dense_layers")
"""Hyperparameters that count layers."""


def missing_model(source: str) -> ModelError:
    """Return the error of a model that is no file, with what may have been meant.

    >>> missing_model("llama3-8b").hint
    'did you mean zoo:llama3-8b?'
    """
    known = names()
    close = [source] if source in known else get_close_matches(source.lower(), known, n=1)
    if close:
        hint = f"did you mean zoo:{close[0]}?"
    elif Path(source).is_dir() or re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        hint = "a model of Hugging Face is given by its configuration: hf:config.json or hf:FOLDER"
    else:
        hint = "give an .onnx file, hf:config.json, or a zoo name such as zoo:gpt2 (autopar model --list)"
    return ModelError(f"{source} does not exist", hint=hint)


def names() -> tuple[str, ...]:
    """Return the names of all models, family by family."""
    return tuple(MODELS)


def spec(name: str) -> ModelSpec:
    """Return what is known of a model.

    Raises:
        ModelError: If the zoo has no model of that name; the hint gives the nearest ones.

    >>> spec("gpt2").num_parameters
    124439808
    """
    if name not in MODELS:
        near = get_close_matches(name.lower(), MODELS, n=3, cutoff=0.4)
        raise ModelError(
            f"the zoo has no model {name!r}",
            hint=f"did you mean {' or '.join(near)}?" if near else "autopar model --list has all names",
        )
    return MODELS[name]


def build(name: str, **overrides: Any) -> "onnx.ModelProto":
    """Return the ONNX graph of a model; its weights have shapes but no data.

    Args:
        name: Name in the zoo.
        **overrides: Fields of the family's configuration that shall differ (`num_layers=2, seq=128`).

    Raises:
        ModelError: If the name or a field is unknown, or the configuration makes no sense.

    >>> build("gpt2", num_layers=1, seq=16).graph.output[0].name
    'logits'
    """
    entry, config = configured(name, overrides)
    model = FAMILIES[entry.family](name_of(entry, config), config)
    model.metadata_props.add(key=CONFIG_KEY, value=json.dumps({"family": entry.family, **asdict(config)}))
    return model


def configured(name: str, overrides: Mapping[str, Any]) -> tuple[ModelSpec, Config]:
    """Return the zoo entry of a model and its configuration with some fields changed.

    Args:
        name: Name in the zoo.
        overrides: Fields of the family's configuration that shall differ.

    Raises:
        ModelError: If the name or a field is unknown, or the configuration makes no sense.
    """
    entry = spec(name)
    known = {field.name: field for field in fields(entry.config)}
    for key in overrides:
        if key not in known:
            raise ModelError(f"{name} has no hyperparameter {key!r}", hint=f"choose from {', '.join(known)}")
    if overrides.get("cached"):
        overrides = {"seq": 1, **overrides}  # a step of decoding makes one token
    changed = {key: _checked(name, known[key], getattr(entry.config, key), value) for key, value in overrides.items()}
    return entry, replace(entry.config, **changed)


def _checked(name: str, field: Field[Any], published: Any, value: Any) -> Any:
    """Return a hyperparameter in the type of its field.

    Fractions may be given as whole numbers. A field allows positive numbers, or those from `metadata["least"]` on.

    Raises:
        ModelError: If the value is of another type, or too small.
    """
    key, hint = field.name, f"published: {field.name}={published}"
    if isinstance(published, bool):
        if value not in (0, 1):
            raise ModelError(f"{key}={value!r} of {name} is neither 0 nor 1", hint=hint)
        return bool(value)
    kind = type(published)
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
        raise ModelError(f"{key}={value!r} of {name} is not of type {kind.__name__}", hint=hint)
    least = field.metadata.get("least")
    sizes = value if isinstance(value, tuple) else (value,)
    wanted = {type(item) for item in published} if kind is tuple else set()
    if wanted and not {type(item) for item in sizes} <= wanted:
        raise ModelError(f"{key}={value!r} of {name} is not made of {wanted.pop().__name__} alone", hint=hint)
    if least is not None and min(sizes) < least:
        raise ModelError(f"{key}={value} of {name} is below {least}", hint=hint)
    if least is None and not all(size > 0 and isfinite(size) for size in sizes or (0,)):
        raise ModelError(f"{key}={value} of {name} is not positive", hint=hint)
    most = MAX_LAYERS if key in _COUNTS else MAX_SIZE
    if max(sizes, default=0) > most:
        raise ModelError(f"{key}={value} of {name} is more than {most}", hint=hint)
    return float(value) if kind is float else value


def name_of(entry: ModelSpec, config: Config) -> str:
    """Return the name of a configuration that was made from a zoo entry: a published name only for published sizes.

    Args:
        entry: The entry it was made from.
        config: The configuration.

    >>> name_of(*configured("gpt2", {"seq": 128})), name_of(*configured("gpt2", {"num_layers": 2}))
    ('gpt2', 'gpt2-2-layers')
    >>> name_of(*configured("gpt3-175b", {"num_layers": 12, "hidden": 768, "heads": 12, "seq": 1024}))
    'gpt2'
    >>> name_of(*configured("gpt2", {"hidden": 256, "heads": 4}))
    'gpt-12-layers-hidden-256'
    """
    like = published(entry.family, config, prefer=entry.name)
    if like is not None:
        return like.name
    base, own = _own_sizes(entry.config), _own_sizes(config)
    if _LAYERS in own and {**base, _LAYERS: own[_LAYERS]} == own:
        return f"{entry.name}-{own[_LAYERS]}-layers"
    sizes = [f"{own[_LAYERS]}-layers"] if _LAYERS in own else []
    sizes += [f"hidden-{own['hidden']}"] if "hidden" in own else []
    return "-".join([entry.family, *(sizes or ["changed"])])


def published(family: str, config: Config, prefer: str = "") -> ModelSpec | None:
    """Return the zoo entry of a family that has a configuration, samples of any size; None if none has.

    Args:
        family: Key of `FAMILIES`.
        config: The configuration.
        prefer: Name of the entry to return if several have it.
    """
    found = {
        item.name: item
        for item in MODELS.values()
        if item.family == family and _own_sizes(item.config) == _own_sizes(config)
    }
    exact = next((item for item in found.values() if item.config == config), None)
    return found.get(prefer) or exact or next(iter(found.values()), None)


def _own_sizes(config: Config) -> dict[str, Any]:
    """Return the fields of a configuration that make another model of it."""
    return {name: value for name, value in asdict(config).items() if name not in _NO_SIZES}


def sizes_of(model: "onnx.ModelProto") -> tuple[str, Config] | None:
    """Return the family and the configuration that a model of the zoo was built from; None for other models.

    Raises:
        ModelError: If the model's metadata names a family or a field that the zoo does not have.
    """
    text = next((item.value for item in model.metadata_props if item.key == CONFIG_KEY), None)
    if text is None:
        return None
    try:
        stated = json.loads(text)
        family = str(stated.pop("family"))
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in stated.items()}
        entry = next(item for item in MODELS.values() if item.family == family)
        return family, configured(entry.name, values)[1]
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
        raise ModelError(
            f"the metadata {CONFIG_KEY} of the model states no configuration of the zoo",
            hint="write the model again with autopar model NAME -o FILE.onnx",
        ) from None


def build_config(family: str, config: Config, name: str = "") -> "onnx.ModelProto":
    """Return the ONNX graph of a configuration that need not be published.

    Args:
        family: Key of `FAMILIES`.
        config: The family's own configuration.
        name: Name of the graph; the family's by default.

    Raises:
        ModelError: If there is no such family, or the configuration makes no sense.
    """
    if family not in FAMILIES:
        raise ModelError(f"the zoo has no family {family!r}", hint=f"choose from {', '.join(FAMILIES)}")
    return FAMILIES[family](name or family, config)


def save(model: "onnx.ModelProto", path: str | Path) -> None:
    """Write a model of the zoo to a file, atomically and the same bytes every time; weights stay absent.

    Raises:
        PlanError: If the file cannot be written.
    """
    write_atomically(Path(path), model.SerializeToString(deterministic=True))

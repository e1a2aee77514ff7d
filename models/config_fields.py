"""Fields of Hugging Face configurations: read by name, checked, and none that changes a model passed over.

Defaults are those of the configuration classes of transformers 5.24, which apply where a file leaves a field out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from autopar.errors import ModelError
from autopar.limits import MAX_SIZE
from autopar.models.decoder_config import Activation
from autopar.models.rotary import Rope, longrope_amplitude, yarn_amplitude

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "attention_bias": (False,),
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "final_logit_softcapping": (None,),
    "head_dim": (None,),
    "is_encoder_decoder": (False,),
    "logits_scaling": (None, 1, 1.0),
    "mlp_bias": (False,),
    "n_routed_experts": (None, 0),
    "no_rope_layers": (None, []),
    "num_experts": (None, 0, 1),
    "num_local_experts": (None, 0, 1),
    "partial_rotary_factor": (None, 1, 1.0),
    "qk_layernorm": (False, None),
    "query_pre_attn_scalar": (None,),
    "residual_multiplier": (None, 1, 1.0),
    "scale_attn_by_inverse_layer_idx": (False,),
    "use_bidirectional_attention": (False, None),
    "use_qk_norm": (False, None),
}
"""Fields that change a model, and the values at which they do not."""
_KINDS_OF_LAYERS = ("layer_types", "layers_block_type")
"""Fields that state the kind of each layer; families that do not read them attend everywhere."""
_WHOLE = frozenset({"full_attention", "attention"})
"""Kinds of layers that attend to all earlier tokens."""


@dataclass(frozen=True, slots=True)
class Unbuilt:
    """A model that no builder of ours makes, though PyTorch may export it.

    Attributes:
        reason: What the builder of its family does not know, as the end of a sentence.
    """

    reason: str


@dataclass(slots=True)
class Fields:
    """The fields of a configuration, read by name; it remembers which have been read.

    Attributes:
        values: The configuration.
        taken: Names that were read.
        presumed: Sizes that were read and are not there, so that the default counts, by the first of their names.
    """

    values: Mapping[str, Any]
    taken: set[str] = field(default_factory=set)
    presumed: dict[str, int] = field(default_factory=dict)

    def presume(self, values: Mapping[str, Any]) -> None:
        """Fill in fields that are missing or null."""
        stated = {name: value for name, value in self.values.items() if value is not None}
        missing = {name: value for name, value in values.items() if name not in stated}
        self.presumed |= {name: value for name, value in missing.items() if type(value) is int}
        self.values = {**values, **stated}

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the first of some fields that is there and not null."""
        self.taken.update(names)
        return next((self.values[name] for name in names if self.values.get(name) is not None), default)

    def size(self, *names: str, default: int | None = None) -> int:
        """Return a positive whole number.

        Raises:
            ModelError: If it is missing and has no default, or is none.
        """
        value = self.get(*names)
        if value is None and default is not None:
            self.presumed[names[0]] = value = default
        if value is None:
            raise self._wrong(names[0], "is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(names[0], f"is {value!r}, not a whole number above 0")
        if value > MAX_SIZE:
            raise self._wrong(names[0], f"is {value!r}, more than {MAX_SIZE}")
        return value

    def number(self, *names: str, default: float) -> float:
        """Return a positive number.

        Raises:
            ModelError: If it is none.
        """
        value = self.get(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0 or not isfinite(value):
            raise self._wrong(names[0], f"is {value!r}, not a number above 0")
        if not 1 / _MOST_NUMBER < value < _MOST_NUMBER:
            raise self._wrong(names[0], f"is {value!r}, which a float32 does not hold")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false.

        Raises:
            ModelError: If it is neither.
        """
        value = self.get(name, default=default)
        if not isinstance(value, bool):
            raise self._wrong(name, f"is {value!r}, neither true nor false")
        return value

    def table(self, name: str) -> Mapping[str, Any]:
        """Return a nested table; empty if there is none.

        Raises:
            ModelError: If it is something else.
        """
        value = self.get(name, default={})
        if not isinstance(value, dict):
            raise self._wrong(name, f"is {value!r}, not a table")
        return value

    def unread(self) -> str:
        """Return the first field nobody has read whose value changes the model, with its value; "" if there is none."""
        for name, values in NEUTRAL.items():
            if name not in self.taken and name in self.values:
                value = self.values[name]
                if not any(value == neutral and type(value) is type(neutral) for neutral in values):
                    return f"{name}={value!r}"
        for name in _KINDS_OF_LAYERS:
            value = self.values.get(name)
            if name not in self.taken and value and not (isinstance(value, list) and _WHOLE.issuperset(value)):
                return f"{name}={value!r}"
        return ""

    def _wrong(self, name: str, what: str) -> ModelError:
        return ModelError(
            f"{name} of the configuration {what}", hint="download the config.json of the model again, or correct it"
        )


class UnknownError(Exception):
    """A value that the family's builder does not know; caught where the family is read."""


_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_fast": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "quick_gelu": "gelu-sigmoid",
    "relu": "relu",
    "relu2": "relu-squared",
}


_MOST_NUMBER = 1e30
"""Numbers from which on, and below whose inverse, products of two would leave the range of float32."""
_MOST_ROTATED = 1 << 16
"""Elements of a head that may be rotated; a table of them is made."""


def activation(fields: Fields, *names: str, default: str) -> Activation:
    """Return a nonlinearity.

    Raises:
        UnknownError: If builders do not know it.
    """
    value = fields.get(*names, default=default)
    if value not in _ACTIVATIONS:
        raise UnknownError(f"{names[0]}={value!r}")
    return _ACTIVATIONS[value]


def rope(fields: Fields, head: int, seq: int, *, share: float = 1.0, theta: float = 1e4) -> Rope:
    """Return the rotary positions: `rope_parameters`, or `rope_theta` beside `rope_scaling` as files had it before.

    Args:
        fields: The configuration.
        head: Elements of a head.
        seq: Tokens per sequence, which choose between the factors of `longrope`.
        share: Rotated part of a head unless the configuration says another.
        theta: Base of the frequencies unless the configuration says another.
    """
    scaling = Fields({**fields.table("rope_scaling"), **fields.table("rope_parameters")})
    theta = scaling.number("rope_theta", default=fields.number("rope_theta", "rotary_emb_base", default=theta))
    part = fields.number("partial_rotary_factor", "rotary_pct", default=share)
    size = int(head * scaling.number("partial_rotary_factor", default=part))
    kind = scaling.get("rope_type", "type", default="default")
    longest = fields.size("max_position_embeddings", default=seq)
    if not 0 < size <= _MOST_ROTATED:
        raise ModelError(
            f"{size} elements of a head of {head} are rotated by the configuration",
            hint=f"correct head_dim and partial_rotary_factor: from 2 to {_MOST_ROTATED}",
        )
    if theta == 1.0 and kind == "yarn":
        raise ModelError("rope_theta of the configuration is 1: nothing is rotated", hint="correct the config.json")
    if kind == "default" or (kind == "dynamic" and seq <= longest):
        return Rope(theta, size)
    original = scaling.get("original_max_position_embeddings")
    original = fields.get("original_max_position_embeddings", default=longest) if original is None else original
    if isinstance(original, bool) or not isinstance(original, int) or original < 1:
        raise ModelError(
            f"original_max_position_embeddings of the configuration is {original!r}, not a whole number above 0",
            hint="download the config.json of the model again, or correct it",
        )
    match kind:
        case "linear":
            return Rope(theta, size, "linear", _factor(scaling, kind))
        case "llama3":
            low, high = scaling.number("low_freq_factor", default=1.0), scaling.number("high_freq_factor", default=4.0)
            return Rope(theta, size, "llama3", _factor(scaling, kind), original, low, high)
        case "yarn":
            factor = scaling.number("factor", default=longest / original)
            usual = yarn_amplitude(factor)
            if scaling.get("mscale") and scaling.get("mscale_all_dim"):
                parts = (scaling.number(name, default=1.0) for name in ("mscale", "mscale_all_dim"))
                above, below = (yarn_amplitude(factor, each) for each in parts)
                usual = above / below
            return Rope(
                theta, size, "yarn", factor, original,
                low=scaling.number("beta_slow", default=1.0), high=scaling.number("beta_fast", default=32.0),
                truncate=scaling.flag("truncate", True), amplitude=scaling.number("attention_factor", default=usual),
            )  # fmt: skip
        case "longrope":
            name = "long_factor" if seq > original else "short_factor"
            factors = scaling.get(name)
            if not isinstance(factors, list) or len(factors) != size // 2:
                raise ModelError(
                    f"{name} of rope_scaling has to be a list of {size // 2} numbers, one per pair of rotated elements",
                    hint="download the config.json of the model again, or correct it",
                )
            usual = longrope_amplitude(longest / original, original)
            amplitude = scaling.number("attention_factor", default=usual)
            return Rope(theta, size, "longrope", factors=tuple(map(float, factors)), amplitude=amplitude)
    raise UnknownError(f"rope_type={kind!r}")


def _factor(scaling: Fields, kind: str) -> float:
    """Return what positions are divided by.

    Raises:
        ModelError: If it is not stated.
    """
    if scaling.get("factor") is None:
        raise ModelError(
            f"rope_scaling of the configuration, of type {kind!r}, has no factor",
            hint="download the config.json of the model again, or correct it",
        )
    return scaling.number("factor", default=1.0)


def layer_kinds(fields: Fields, num_layers: int, default: Callable[[int], str]) -> tuple[str, ...]:
    """Return the kind of attention of each block: `layer_types`, or what the family has by default.

    Args:
        fields: The configuration.
        num_layers: Blocks.
        default: Kind of a block by its number.

    Raises:
        ModelError: If `layer_types` is no list of so many names.
        UnknownError: If a kind is unknown.
    """
    stated = fields.get("layer_types", default=[default(index) for index in range(num_layers)])
    if not isinstance(stated, list) or len(stated) < num_layers:
        raise ModelError(
            f"layer_types of the configuration is {stated!r}, not a list of {num_layers} kinds",
            hint="correct the config.json",
        )
    strange = [kind for kind in stated if kind not in ("full_attention", "sliding_attention", "chunked_attention")]
    if strange:
        raise UnknownError(f"layer_types with {strange[0]!r}")
    return tuple(stated[:num_layers])


def windows(fields: Fields, num_layers: int, default: Callable[[int], bool], window: int | None = None) -> list[int]:
    """Return the sliding window of each block; 0 where it sees all keys.

    Args:
        fields: The configuration.
        num_layers: Blocks.
        default: Whether a block has one by default.
        window: Default of `sliding_window`; None for no window.

    Raises:
        UnknownError: If a block has chunks.
    """
    kinds = layer_kinds(fields, num_layers, lambda index: _KINDS[default(index)])
    if "chunked_attention" in kinds:
        raise UnknownError("layer_types with 'chunked_attention'")
    if window is None and fields.get("sliding_window") is None:
        return [0] * num_layers
    size = fields.size("sliding_window", default=window)
    return [size if kind == "sliding_attention" else 0 for kind in kinds]


_KINDS = ("full_attention", "sliding_attention")


def head_size(fields: Fields, hidden: int, heads: int) -> int:
    """Return `head_dim`, or the width by the heads.

    Raises:
        ModelError: If the heads do not divide the width and nothing says how large one is.
    """
    if fields.get("head_dim") is None and hidden % heads:
        raise ModelError(
            f"hidden_size {hidden} of the configuration is not divisible by its {heads} heads",
            hint="correct num_attention_heads, or say head_dim",
        )
    return fields.size("head_dim", default=hidden // heads)

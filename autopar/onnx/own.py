"""Ops of domain `autopar` in a model file: which are read, their form, and the types of what they make."""

from collections.abc import Callable, Mapping, Sequence
from math import isfinite

import onnx
from onnx import AttributeProto

from autopar.errors import ModelError
from autopar.ir.functions import DOMAIN, function_proto
from autopar.ir.graph import Attr, Value

Type = tuple[tuple[int, ...], str]
"""Shape and dtype."""
_CHECK = "write the model again with autopar model"


class _MismatchError(Exception):
    """Inputs that an op does not take; caught in `own_types`."""


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise _MismatchError(what)


def _rows(x: Value) -> tuple[int, int, int, int]:
    _require(x.is_float and len(x.shape) == 4, "rows are float [experts, samples, positions, width]")
    experts, samples, positions, width = x.shape
    return experts, samples, positions, width


def _choice(x: Value, samples: int, positions: int, what: str) -> None:
    _require(len(x.shape) == 3 and x.shape[:2] == (samples, positions), f"{what} is [samples, positions, choices]")


def _numbers(x: Value) -> int:
    _require(x.dtype in ("int32", "int64") and len(x.shape) == 1, "numbers of experts are a list of integers")
    return x.shape[0]


def _dispatch(inputs: Sequence[Value]) -> tuple[Type, ...]:
    x, expert, numbers = inputs
    _require(x.is_float and len(x.shape) == 3, "data are float [samples, positions, width]")
    samples, positions = x.shape[:2]
    _choice(expert, samples, positions, "choice of experts")
    _require(not expert.is_float, "a choice of experts is of integers")
    return (((_numbers(numbers), *x.shape), x.dtype),)


def _held(inputs: Sequence[Value]) -> tuple[Type, ...]:
    (rows,) = inputs
    return ((_rows(rows), rows.dtype),)


def _sum(inputs: Sequence[Value]) -> tuple[Type, ...]:
    rows, expert, numbers = inputs
    experts, samples, positions, width = _rows(rows)
    _choice(expert, samples, positions, "choice of experts")
    _require(not expert.is_float and _numbers(numbers) == experts, "choices are integers, and there is one number each")
    return (((samples, positions, width), rows.dtype),)


def _combine(inputs: Sequence[Value]) -> tuple[Type, ...]:
    rows, weight, expert, numbers = inputs
    experts, samples, positions, width = _rows(rows)
    _choice(weight, samples, positions, "weight of experts")
    _choice(expert, samples, positions, "choice of experts")
    _require(weight.dtype == rows.dtype and not expert.is_float, "weights are float as rows are, choices integers")
    _require(expert.shape == weight.shape and _numbers(numbers) == experts, "one weight per choice, one number each")
    return (((samples, positions, width), rows.dtype),)


def _grouped(inputs: Sequence[Value]) -> tuple[Type, ...]:
    rows, weight = inputs
    experts, samples, positions, width = _rows(rows)
    _require(weight.dtype == rows.dtype and len(weight.shape) == 3, "weights are [experts, width in, width out]")
    _require(weight.shape[:2] == (experts, width), "one matrix per expert, of as many rows as the width")
    return (((experts, samples, positions, weight.shape[2]), rows.dtype),)


def _attention(inputs: Sequence[Value]) -> tuple[Type, ...]:
    q, k, v = inputs[:3]
    same = len({value.dtype for value in inputs}) == 1 and q.is_float
    _require(same and all(len(value.shape) == 4 for value in (q, k, v)), "all are float [samples, heads, length, size]")
    (samples, heads, length, size), (_, key_heads, keys, _) = q.shape, k.shape
    _require(k.shape == (samples, key_heads, keys, size) and key_heads > 0, "keys have the samples and size of queries")
    _require(
        v.shape[:3] == k.shape[:3] and heads % key_heads == 0, "keys and values have heads that divide those of queries"
    )
    _require(0 < length <= keys, "queries are the last positions of the keys")
    return (((samples, heads, length, v.shape[3]), q.dtype),)


def _sink_attention(inputs: Sequence[Value]) -> tuple[Type, ...]:
    found = _attention(inputs)
    _require(inputs[3].shape == inputs[0].shape[1:2], "there is one sink per head of queries")
    return found


def _cached_attention(inputs: Sequence[Value]) -> tuple[Type, ...]:
    q, cached_k, cached_v, k, v = inputs[:5]
    _require(all(value.dtype == q.dtype for value in inputs), "all inputs are of one type")
    found = _attention((q, k, v))
    _require(q.shape[2] == k.shape[2], "there is a key for every query")
    for cached, own in ((cached_k, k), (cached_v, v)):
        same = len(cached.shape) == 4 and (*cached.shape[:2], cached.shape[3]) == (*own.shape[:2], own.shape[3])
        _require(same, "caches have the samples, heads and sizes of keys and values")
    _require(cached_k.shape[2] == cached_v.shape[2], "caches of keys and values are of one length")
    return found


def _cached_sink_attention(inputs: Sequence[Value]) -> tuple[Type, ...]:
    found = _cached_attention(inputs)
    _require(inputs[5].shape == inputs[0].shape[1:2], "there is one sink per head of queries")
    return found


def _cached_latent(inputs: Sequence[Value], rank: Attr | None) -> tuple[Type, ...]:
    q, cache, latent = inputs
    _require(q.is_float and all(value.dtype == q.dtype for value in inputs), "all inputs are float, of one type")
    _require(len(q.shape) == 4, "queries are [samples, heads, length, size]")
    samples, heads, length, size = q.shape
    _require(latent.shape == (samples, length, size), "there is a vector for every query, of its size")
    fits = len(cache.shape) == 3 and (cache.shape[0], cache.shape[2]) == (samples, size)
    _require(fits, "the cache has the samples and the size of queries")
    fits = isinstance(rank, int) and 0 < rank <= size
    _require(fits, f"its rank {rank} is not the number of the first elements of a key, which are latent")
    assert isinstance(rank, int), "checked"
    return (((samples, heads, length, rank), q.dtype),)


def _scan_heads(x: Value, shared: Sequence[Value], per_token: Sequence[Value], per_head: Sequence[Value]) -> None:
    """Check data of heads, what groups of heads share, and numbers per token and head or per head."""
    _require(x.is_float and len(x.shape) == 4, "data are float [samples, positions, heads, channels]")
    _require(all(value.dtype == x.dtype for value in (*shared, *per_token, *per_head)), "all inputs are of one type")
    tokens, heads = x.shape[:2], x.shape[2]
    first = shared[0].shape
    _require(len(first) == 4 and all(value.shape == first for value in shared), "what groups share is of one shape")
    _require(first[:2] == tokens and first[2] > 0 and heads % first[2] == 0, "groups divide the heads")
    _require(all(value.shape == (*tokens, heads) for value in per_token), "there is a number per token and head")
    _require(all(value.shape == (heads,) for value in per_head), "there is a number per head")


def _state_space(inputs: Sequence[Value]) -> tuple[Type, ...]:
    x, dt, a_log, b, c, d, dt_bias = inputs
    _scan_heads(x, (b, c), (dt,), (a_log, d, dt_bias))
    return ((x.shape, x.dtype),)


def _selective_scan(inputs: Sequence[Value]) -> tuple[Type, ...]:
    x, dt, a_log, b, c, d, dt_bias = inputs
    _require(x.is_float and len(x.shape) == 3, "data are float [samples, positions, channels]")
    _require(all(value.dtype == x.dtype for value in inputs), "all inputs are of one type")
    samples, positions, channels = x.shape
    _require(len(a_log.shape) == 2 and a_log.shape[0] == channels, "rates of decay are [channels, numbers of state]")
    shared = (samples, positions, a_log.shape[1])
    _require(b.shape == shared and c.shape == shared, "channels share a number per token and number of state")
    _require(dt.shape == x.shape, "there is a number per token and channel")
    _require(d.shape == (channels,) and dt_bias.shape == (channels,), "there is a number per channel")
    return ((x.shape, x.dtype),)


def _gated_delta(inputs: Sequence[Value]) -> tuple[Type, ...]:
    q, k, v, a, b, a_log, dt_bias = inputs
    _scan_heads(v, (q, k), (a, b), (a_log, dt_bias))
    return ((v.shape, v.dtype),)


def _cached_state_space(inputs: Sequence[Value]) -> tuple[Type, ...]:
    state, x, *_, b = inputs[:5]
    found = _state_space(inputs[1:])
    samples, _, heads, channels = x.shape
    _require(state.dtype == x.dtype and state.shape == (samples, heads, channels, b.shape[3]), "a state is per channel")
    return found


def _cached_selective_scan(inputs: Sequence[Value]) -> tuple[Type, ...]:
    state, x, _, a_log = inputs[:4]
    found = _selective_scan(inputs[1:])
    _require(state.dtype == x.dtype and state.shape == (x.shape[0], *a_log.shape), "a state is per channel")
    return found


def _cached_gated_delta(inputs: Sequence[Value]) -> tuple[Type, ...]:
    state, _, k, v = inputs[:4]
    found = _gated_delta(inputs[1:])
    shape = (v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    _require(state.dtype == v.dtype and state.shape == shape, "there is a state per head, from keys to values")
    return found


def _cached_convolution(inputs: Sequence[Value]) -> tuple[Type, ...]:
    cache, x, weight = inputs
    _require(x.is_float and len(x.shape) == 3, "data are float [samples, positions, channels]")
    _require(all(value.dtype == x.dtype for value in inputs), "all inputs are of one type")
    samples, _, channels = x.shape
    fits = len(weight.shape) == 3 and weight.shape[:2] == (channels, 1) and weight.shape[2] > 1
    _require(fits, "weights are [channels, 1, taps], of two taps or more")
    _require(
        cache.shape == (samples, weight.shape[2] - 1, channels), "the cache has a token for every tap but the last"
    )
    return ((x.shape, x.dtype),)


def _relative_attention(inputs: Sequence[Value]) -> tuple[Type, ...]:
    found = _attention(inputs)
    q, k, _, bias = inputs
    _require(q.shape[2] == k.shape[2], "there is a key for every query")
    _require(
        len(bias.shape) == 2 and bias.shape[0] == q.shape[1] and bias.shape[1] % 2 == 1,
        "biases are [heads, distances], an odd number of them",
    )
    return found


_TYPES: Mapping[str, Callable[[Sequence[Value]], tuple[Type, ...]]] = {
    f"{DOMAIN}::CachedAttention": _cached_attention,
    f"{DOMAIN}::CachedConvolution": _cached_convolution,
    f"{DOMAIN}::CachedGatedDeltaRule": _cached_gated_delta,
    f"{DOMAIN}::CachedSelectiveScan": _cached_selective_scan,
    f"{DOMAIN}::CachedSinkAttention": _cached_sink_attention,
    f"{DOMAIN}::CachedStateSpaceScan": _cached_state_space,
    f"{DOMAIN}::CausalAttention": _attention,
    f"{DOMAIN}::RelativeAttention": _relative_attention,
    f"{DOMAIN}::SinkAttention": _sink_attention,
    f"{DOMAIN}::ExpertDispatch": _dispatch,
    f"{DOMAIN}::ExpertCombine": _combine,
    f"{DOMAIN}::ExpertRows": _held,
    f"{DOMAIN}::ExpertSum": _sum,
    f"{DOMAIN}::GatedDeltaRule": _gated_delta,
    f"{DOMAIN}::GroupedMatMul": _grouped,
    f"{DOMAIN}::SelectiveScan": _selective_scan,
    f"{DOMAIN}::StateSpaceScan": _state_space,
}
_LATENT = f"{DOMAIN}::CachedLatentAttention"
"""The kind whose result has the size that an attribute says."""

NUMBERED: Mapping[str, int] = {f"{DOMAIN}::ExpertDispatch": 2, f"{DOMAIN}::ExpertSum": 2, f"{DOMAIN}::ExpertCombine": 3}
"""Kinds that read the numbers of experts, and at which input."""


def is_own(kind: str) -> bool:
    """Whether an op of domain `autopar` may stand in a file."""
    return kind in _TYPES or kind == _LATENT


def check_own(node: onnx.NodeProto, what: str) -> None:
    """Check that a node has the inputs, outputs and attributes of its op.

    Raises:
        ModelError: If it has another form.
    """
    proto = function_proto(f"{DOMAIN}::{node.op_type}")
    for given, known, slots in ((node.input, proto.input, "inputs"), (node.output, proto.output, "outputs")):
        if len(given) != len(known) or not all(given):
            raise ModelError(f"{what} has not all of its {len(known)} {slots}", hint=_CHECK)
    kinds = {item.name: item.type for item in proto.attribute_proto}
    kinds |= dict.fromkeys(proto.attribute, AttributeProto.FLOAT)  # those without a default
    missing = sorted(set(proto.attribute) - {attribute.name for attribute in node.attribute})
    if missing:
        raise ModelError(f"{what} lacks attribute {missing[0]!r}", hint=_CHECK)
    for attribute in node.attribute:
        if kinds.get(attribute.name) != attribute.type:
            raise ModelError(f"{what} has an attribute {attribute.name!r} that its op does not have", hint=_CHECK)
        if attribute.type == AttributeProto.FLOAT and not isfinite(attribute.f):
            raise ModelError(f"{what} has {attribute.name}={attribute.f}", hint=_CHECK)
        if attribute.type == AttributeProto.INT and attribute.i < 0:
            raise ModelError(f"{what} has {attribute.name}={attribute.i}", hint=_CHECK)
        if attribute.type == AttributeProto.FLOAT and attribute.name == "fill" and not 0 < attribute.f <= 1:
            raise ModelError(f"{what} has fill={attribute.f:g}, not a share above 0 and up to 1", hint=_CHECK)


def own_types(
    kind: str, attrs: Sequence[tuple[str, Attr]], inputs: Sequence[Value | None], name: str
) -> tuple[Type, ...]:
    """Return the types of the outputs of an op.

    Raises:
        ModelError: If the inputs do not fit it.
    """
    known = [value for value in inputs if value is not None]
    try:
        return _cached_latent(known, dict(attrs).get("rank")) if kind == _LATENT else _TYPES[kind](known)
    except _MismatchError as error:
        given = ", ".join(f"{value.dtype}{list(value.shape)}" for value in inputs if value is not None)
        raise ModelError(f"node {name!r} ({kind}) does not fit its inputs {given}: {error}", hint=_CHECK) from None

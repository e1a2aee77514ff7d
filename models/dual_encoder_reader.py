"""Configurations of dual encoders: CLIP and SigLIP."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from autopar.models.config_fields import Fields, UnknownError
from autopar.models.decoder_config import Attention, Norm
from autopar.models.dual_encoder import DualEncoderConfig
from autopar.models.encoder_config import EncoderConfig, OneToken, Tokens
from autopar.models.encoder_reader import attention_pool, blocks_of, built_as, clip_tower, siglip_tower, tower_names

_IMAGE, _TEXT = "vision.vector", "text.vector"


def _tower_fields(fields: Fields, name: str, kind: str) -> Fields:
    """Return the fields of a tower; a table `..._dict` beside, as older files have it, takes the place of the usual.

    Raises:
        UnknownError: If it is a tower of another kind.
    """
    found = Fields(fields.table(f"{name}_dict") or fields.table(name))
    if found.get("model_type", default=kind) != kind:
        raise UnknownError(f"{name} with model_type={found.get('model_type')!r}")
    return found


def _check_read(tower: Fields, name: str) -> None:
    if tower.unread():
        raise UnknownError(f"{name} with {tower.unread()}")


def _text_tower(
    fields: Fields, seq: int, sizes: tuple[int, int, int, int], nonlinearity: str, epsilon: float, *, causal: bool
) -> EncoderConfig:
    """Return a tower of texts, whose head is still to be set.

    Args:
        fields: Its configuration.
        seq: Tokens per text.
        sizes: Defaults of model width, width inside the MLP, heads and positions.
        nonlinearity: Default of `hidden_act`.
        epsilon: Default of `layer_norm_eps`.
        causal: Whether no token sees a later one.
    """
    hidden = fields.size("hidden_size", default=sizes[0])
    of = "text_model.embeddings"
    tokens = Tokens(
        fields.size("vocab_size", default=49408 if causal else 32000),
        fields.size("max_position_embeddings", default=sizes[3]), 0, 0,
        (f"{of}.token_embedding", f"{of}.position_embedding", "", ""),
    )  # fmt: skip
    blocks = blocks_of(fields, hidden, sizes[1], nonlinearity, heads=sizes[2])
    attention = blocks[0].attention
    assert isinstance(attention, Attention), "towers have grouped attention"
    block = replace(blocks[0], attention=replace(attention, causal=causal))
    return EncoderConfig(
        tokens, (block,) * len(blocks), hidden, seq, Norm("layer", fields.number("layer_norm_eps", default=epsilon)),
        "pre", tower_names("text_model."),
        OneToken("text_model.final_layer_norm", "", 0, bias=False, output=_TEXT, is_last=True),
    )  # fmt: skip


def _with_projection(tower: EncoderConfig, name: str, width: int, *, bias: bool) -> EncoderConfig:
    """Return a tower whose vector is projected to `width` elements."""
    assert isinstance(tower.head, OneToken), "the vector is made of one token"
    return replace(tower, head=replace(tower.head, projection=name, width=width, bias=bias))


def _clip(fields: Fields, seq: int) -> DualEncoderConfig:
    built_as(fields, "CLIPModel")
    width = fields.size("projection_dim", default=512)
    of_text = _tower_fields(fields, "text_config", "clip_text_model")
    of_vision = _tower_fields(fields, "vision_config", "clip_vision_model")
    text = _text_tower(of_text, seq, (512, 2048, 8, 77), "quick_gelu", 1e-5, causal=True)
    head = OneToken("vision_model.post_layernorm", "visual_projection", width, bias=False, output=_IMAGE)
    vision = clip_tower(of_vision, "vision_model.", head)
    _check_read(of_text, "text_config")
    _check_read(of_vision, "vision_config")
    return DualEncoderConfig(vision, _with_projection(text, "text_projection", width, bias=False), (), None)


def _siglip(fields: Fields, seq: int) -> DualEncoderConfig:
    built_as(fields, "SiglipModel")
    of_text = _tower_fields(fields, "text_config", "siglip_text_model")
    of_vision = _tower_fields(fields, "vision_config", "siglip_vision_model")
    text = _text_tower(of_text, seq, (768, 3072, 12, 64), "gelu_pytorch_tanh", 1e-6, causal=False)
    width = of_text.size("projection_size", default=text.hidden)
    if not of_vision.flag("vision_use_head", True):
        raise UnknownError("vision_config with vision_use_head=False")
    prefix = "vision_model."
    vision = siglip_tower(of_vision, prefix, lambda block: attention_pool(block, prefix, _IMAGE))
    _check_read(of_text, "text_config")
    _check_read(of_vision, "vision_config")
    return DualEncoderConfig(vision, _with_projection(text, "text_model.head", width, bias=True), (1,), (1,))


DUAL_ENCODERS: Mapping[str, Callable[[Fields, int], DualEncoderConfig]] = {"clip": _clip, "siglip": _siglip}
"""Reader of each `model_type`."""

TEXT_LENGTHS: Mapping[str, int] = {"clip": 77, "siglip": 64}
"""Tokens per text where a configuration does not say for how many there are positions."""

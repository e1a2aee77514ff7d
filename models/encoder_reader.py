"""Configurations of encoders: BERT and RoBERTa as masked language models, ViT, vision towers of CLIP and SigLIP."""

from collections.abc import Callable, Mapping
from typing import Any

from autopar.errors import ModelError
from autopar.models.config_fields import Fields, UnknownError, activation, head_size
from autopar.models.decoder_config import Attention, Block, Mlp, Names, Norm
from autopar.models.encoder_config import (
    AttentionPool,
    EncoderConfig,
    Head,
    MaskedLanguageHead,
    OneToken,
    Patches,
    Tokens,
    WholeSequence,
)


def built_as(fields: Fields, *names: str) -> str:
    """Return the class of the model: the one that the configuration names, or the first of those that are built.

    Args:
        fields: The configuration.
        *names: Classes that are built.

    Raises:
        UnknownError: If it names another one.
    """
    stated = fields.get("architectures", default=[])
    if not stated:
        return names[0]
    if stated[0] not in names:
        raise UnknownError(f"architectures={stated!r}; {fields.get('model_type')} is built as {' or '.join(names)}")
    return str(stated[0])


def blocks_of(
    fields: Fields, hidden: int, width: int, nonlinearity: str, *, heads: int = 12, qkv_bias: bool = True
) -> tuple[Block, ...]:
    """Return the equal blocks of an encoder whose fields are called as BERT's.

    Args:
        fields: The configuration.
        hidden: Model width.
        width: Default of `intermediate_size`.
        nonlinearity: Default of `hidden_act`.
        heads: Default of `num_attention_heads`.
        qkv_bias: Whether queries, keys and values have a bias.
    """
    heads = fields.size("num_attention_heads", default=heads)
    attention = Attention(
        heads, heads, head_size(fields, hidden, heads), qkv_bias=qkv_bias, out_bias=True, causal=False
    )
    mlp = Mlp(
        fields.size("intermediate_size", default=width),
        activation(fields, "hidden_act", default=nonlinearity),
        gated=False,
        bias=True,
    )
    return (Block(attention, mlp),) * fields.size("num_hidden_layers", default=12)


def _masked_language_model(fields: Fields, seq: int, prefix: str, vocab: int, **parts: Any) -> EncoderConfig:
    """Return BERT, or what differs from it in the size of the vocabulary, in names and in the first position."""
    for name, usual in (("is_decoder", False), ("tie_word_embeddings", True)):
        if fields.flag(name, usual) != usual:
            raise UnknownError(f"{name}={not usual}")
    if fields.get("position_embedding_type", default="absolute") != "absolute":
        raise UnknownError(f"position_embedding_type={fields.get('position_embedding_type')!r}")
    hidden = fields.size("hidden_size", default=768)
    tables = ("word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm")
    return EncoderConfig(
        Tokens(
            fields.size("vocab_size", default=vocab),
            fields.size("max_position_embeddings", default=512),
            parts["first_position"],
            fields.size("type_vocab_size", default=2),
            tuple(f"{prefix}.embeddings.{table}" for table in tables),  # type: ignore[arg-type]
        ),
        blocks_of(fields, hidden, 3072, "gelu"),
        hidden,
        seq,
        Norm("layer", fields.number("layer_norm_eps", default=1e-12)),
        "after",
        Names(
            "", f"{prefix}.encoder.layer.{{}}", "attention.output.LayerNorm", "output.LayerNorm",
            ("attention.self.query", "attention.self.key", "attention.self.value"), "attention.output.dense",
            ("intermediate.dense", "output.dense"), "",
        ),
        parts["head"],
    )  # fmt: skip


def _bert(fields: Fields, seq: int) -> EncoderConfig:
    built_as(fields, "BertForMaskedLM")
    transform = "cls.predictions.transform"
    names = f"{transform}.dense", f"{transform}.LayerNorm", "cls.predictions.bias"
    head = MaskedLanguageHead(activation(fields, "hidden_act", default="gelu"), names)
    return _masked_language_model(fields, seq, "bert", 30522, first_position=0, head=head)


def _roberta(fields: Fields, seq: int, name: str = "RobertaForMaskedLM", vocab: int = 50265) -> EncoderConfig:
    built_as(fields, name)
    head = MaskedLanguageHead("gelu", ("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"))
    padding = fields.get("pad_token_id", default=1)
    if isinstance(padding, bool) or not isinstance(padding, int) or padding < 0:
        raise ModelError(
            f"pad_token_id of the configuration is {padding!r}, not a whole number",
            hint="positions of RoBERTa begin behind it; download the config.json of the model again",
        )
    return _masked_language_model(fields, seq, "roberta", vocab, first_position=padding + 1, head=head)


def _xlm_roberta(fields: Fields, seq: int) -> EncoderConfig:
    return _roberta(fields, seq, "XLMRobertaForMaskedLM", 30522)


def _side(fields: Fields, name: str, default: int) -> tuple[int, int]:
    """Return a height and a width: a number for both, or two.

    Raises:
        ModelError: If it is neither.
    """
    value = fields.get(name, default=default)
    sides = value if isinstance(value, list) else [value, value]
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ModelError(f"{name} of the configuration is {value!r}", hint="it is a whole number, or two")
    return sides[0], sides[1]


def _classes(fields: Fields) -> int:
    """Return the classes of a classifier: those named, or `num_labels`."""
    labels = fields.table("id2label")
    return len(labels) if labels else fields.size("num_labels", default=2)


def _vit(fields: Fields, seq: int) -> EncoderConfig:
    built_as(fields, "ViTForImageClassification")
    hidden = fields.size("hidden_size", default=768)
    patches = Patches(
        fields.size("num_channels", default=3), _side(fields, "image_size", 224), _side(fields, "patch_size", 16),
        bias=True, class_token="vit.embeddings.cls_token", class_shape=(1, 1, hidden),
        projection="vit.embeddings.patch_embeddings.projection", positions="vit.embeddings.position_embeddings",
        positions_rank=3,
    )  # fmt: skip
    return EncoderConfig(
        patches,
        blocks_of(fields, hidden, 3072, "gelu", qkv_bias=fields.flag("qkv_bias", True)),
        hidden,
        patches.seq,
        Norm("layer", fields.number("layer_norm_eps", default=1e-12)),
        "pre",
        Names(
            "", "vit.layers.{}", "layernorm_before", "layernorm_after",
            ("attention.q_proj", "attention.k_proj", "attention.v_proj"), "attention.o_proj", ("mlp.fc1", "mlp.fc2"),
            "",
        ),
        OneToken("vit.layernorm", "classifier", _classes(fields), bias=True, output="logits"),
    )  # fmt: skip


def tower_names(prefix: str) -> Names:
    """Return the names of the weights of a vision tower of CLIP or SigLIP."""
    return Names(
        "", f"{prefix}encoder.layers.{{}}", "layer_norm1", "layer_norm2",
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.out_proj", ("mlp.fc1", "mlp.fc2"), "",
    )  # fmt: skip


def clip_tower(fields: Fields, prefix: str, head: Head) -> EncoderConfig:
    """Read the vision tower of CLIP (Radford et al. 2021).

    Args:
        fields: Its configuration.
        prefix: What names of weights begin with.
        head: What is made of its result.
    """
    hidden = fields.size("hidden_size", default=768)
    patches = Patches(
        fields.size("num_channels", default=3), _side(fields, "image_size", 224), _side(fields, "patch_size", 32),
        bias=False, class_token=f"{prefix}embeddings.class_embedding", class_shape=(hidden,),
        projection=f"{prefix}embeddings.patch_embedding", positions=f"{prefix}embeddings.position_embedding.weight",
        positions_rank=2, norm=f"{prefix}pre_layrnorm",
    )  # fmt: skip
    return EncoderConfig(
        patches, blocks_of(fields, hidden, 3072, "quick_gelu"), hidden, patches.seq,
        Norm("layer", fields.number("layer_norm_eps", default=1e-5)), "pre", tower_names(prefix), head,
    )  # fmt: skip


def _clip(fields: Fields, seq: int) -> EncoderConfig:
    if built_as(fields, "CLIPVisionModel", "CLIPVisionModelWithProjection") == "CLIPVisionModel":
        return clip_tower(fields, "", OneToken("post_layernorm", "", 0, bias=False, output="pooler_output"))
    width = fields.size("projection_dim", default=512)
    norm = "vision_model.post_layernorm"
    head = OneToken(norm, "visual_projection", width, bias=False, output="image_embeds")
    return clip_tower(fields, "vision_model.", head)


def siglip_tower(fields: Fields, prefix: str, head: Callable[[Block], Head]) -> EncoderConfig:
    """Read the vision tower of SigLIP (Zhai et al. 2023).

    Args:
        fields: Its configuration.
        prefix: What names of weights begin with.
        head: What is made of its result, given what blocks are.
    """
    hidden = fields.size("hidden_size", default=768)
    patches = Patches(
        fields.size("num_channels", default=3), _side(fields, "image_size", 224), _side(fields, "patch_size", 16),
        bias=True, class_token="", class_shape=(), projection=f"{prefix}embeddings.patch_embedding",
        positions=f"{prefix}embeddings.position_embedding.weight", positions_rank=2,
    )  # fmt: skip
    blocks = blocks_of(fields, hidden, 3072, "gelu_pytorch_tanh")
    return EncoderConfig(
        patches, blocks, hidden, patches.seq, Norm("layer", fields.number("layer_norm_eps", default=1e-6)), "pre",
        tower_names(prefix), head(blocks[0]),
    )  # fmt: skip


def _siglip(fields: Fields, seq: int) -> EncoderConfig:
    built_as(fields, "SiglipVisionModel")
    if not fields.flag("vision_use_head", True):
        return siglip_tower(fields, "", lambda block: WholeSequence("post_layernorm", "last_hidden_state"))
    return siglip_tower(fields, "", lambda block: attention_pool(block, "", "pooler_output"))


def attention_pool(block: Block, prefix: str, output: str) -> AttentionPool:
    """Return SigLIP's head of a tower of such blocks.

    Args:
        block: A block of the tower.
        prefix: What names of weights begin with.
        output: Name of what the head makes.
    """
    assert isinstance(block.attention, Attention), "SigLIP has grouped attention"
    assert isinstance(block.mlp, Mlp), "SigLIP has no experts"
    return AttentionPool(f"{prefix}post_layernorm", f"{prefix}head", block.attention.heads, block.mlp, output)


ENCODERS: Mapping[str, Callable[[Fields, int], EncoderConfig]] = {
    "bert": _bert,
    "roberta": _roberta,
    "xlm-roberta": _xlm_roberta,
    "vit": _vit,
    "clip_vision_model": _clip,
    "siglip_vision_model": _siglip,
}
"""Reader of each `model_type`."""

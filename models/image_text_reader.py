"""Configurations of decoders of images and text: LLaVA (Liu et al. 2023)."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from autopar.models.config_fields import Fields, Unbuilt, UnknownError, activation
from autopar.models.decoder_config import DecoderConfig, Names
from autopar.models.encoder_config import WholeSequence
from autopar.models.encoder_reader import built_as, clip_tower
from autopar.models.image_text_config import ImageTextConfig, Projector

_TOWER = {"hidden_size": 1024, "intermediate_size": 4096, "patch_size": 14, "image_size": 336, "num_hidden_layers": 24,
          "num_attention_heads": 16}  # fmt: skip


def llava(fields: Fields, seq: int, read: Callable[[Mapping[str, Any], int], object]) -> ImageTextConfig:
    """Read LLaVA: CLIP's vision tower and a decoder of any known type.

    Layers of the tower behind the one whose result is used are left out.

    Args:
        fields: The configuration.
        seq: Tokens per sequence, those of the image included.
        read: Reads the configuration of the decoder (`architectures.read_architecture`).
    """
    built_as(fields, "LlavaForConditionalGeneration")
    vision, text = dict(fields.table("vision_config")), dict(fields.table("text_config"))
    if vision.setdefault("model_type", "clip_vision_model") != "clip_vision_model":
        raise UnknownError(f"vision_config with model_type={vision['model_type']!r}")
    text.setdefault("model_type", "llama")
    decoder = read(text, seq)
    if isinstance(decoder, Unbuilt):
        raise UnknownError(f"text_config with {decoder.reason}")
    if not isinstance(decoder, DecoderConfig):
        raise UnknownError(f"text_config with model_type={text['model_type']!r}, which is no decoder")
    strategy = fields.get("vision_feature_select_strategy", default="default")
    if strategy != "default":
        raise UnknownError(f"vision_feature_select_strategy={strategy!r}")
    of_vision = Fields({**_TOWER, **vision})
    tower = clip_tower(of_vision, "model.vision_tower.", WholeSequence("", ""))
    if of_vision.unread():
        raise UnknownError(f"vision_config with {of_vision.unread()}")
    layer = fields.get("vision_feature_layer", default=-2)
    count = tower.num_layers + 1  # results of the embedding and of every block
    if isinstance(layer, bool) or not isinstance(layer, int) or not -count <= layer < count:
        raise UnknownError(f"vision_feature_layer={layer!r}")
    projector = Projector(
        activation(fields, "projector_hidden_act", default="gelu"),
        fields.flag("multimodal_projector_bias", True),
        ("model.multi_modal_projector.linear_1", "model.multi_modal_projector.linear_2"),
    )
    tied = fields.flag("tie_word_embeddings", False) or decoder.tied
    return ImageTextConfig(
        replace(tower, blocks=tower.blocks[: layer % count]),
        projector,
        replace(decoder, names=_inside(decoder.names), tied=tied),
    )


def _inside(names: Names) -> Names:
    """Return the names that the weights of a decoder have inside LLaVA."""

    def inner(name: str) -> str:
        return f"model.language_model.{name.removeprefix('model.')}" if name else name

    return replace(
        names, embed=inner(names.embed), layer=inner(names.layer), final_norm=inner(names.final_norm),
        positions=inner(names.positions),
    )  # fmt: skip

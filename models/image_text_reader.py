"""Configurations of decoders of images and text: LLaVA, Gemma 3, Llama 4, Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isqrt
from typing import Any, Literal

from autopar.errors import ModelError
from autopar.models.config_fields import Fields, Unbuilt, UnknownError, activation
from autopar.models.decoder_config import Attention, Block, DecoderConfig, Mlp, Names, Norm
from autopar.models.encoder_config import EncoderConfig, FlatPatches, Patches, WholeSequence
from autopar.models.encoder_reader import built_as, clip_tower, siglip_tower
from autopar.models.image_text_config import ImageTextConfig, Merger, PixelShuffle, Pooled, Projector, Tap
from autopar.models.rotary import Grid, Rope

Read = Callable[[Mapping[str, Any], int], object]
"""Reads the configuration of a decoder (`architectures.read_architecture`)."""

_TOWER = {"hidden_size": 1024, "intermediate_size": 4096, "patch_size": 14, "image_size": 336, "num_hidden_layers": 24,
          "num_attention_heads": 16}  # fmt: skip
_NO_HEAD = WholeSequence("", "")


def _llava(fields: Fields, seq: int, read: Read) -> ImageTextConfig:
    """Read LLaVA (Liu et al. 2023): CLIP's vision tower and a decoder of any known type.

    Layers of the tower behind the one whose result is used are left out.
    """
    built_as(fields, "LlavaForConditionalGeneration")
    decoder = _decoder(_text(fields, "llama"), seq, read)
    strategy = fields.get("vision_feature_select_strategy", default="default")
    if strategy != "default":
        raise UnknownError(f"vision_feature_select_strategy={strategy!r}")
    of_vision = _vision(fields, "clip_vision_model", _TOWER)
    tower = clip_tower(of_vision, "model.vision_tower.", _NO_HEAD)
    _check_read(of_vision)
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
        replace(tower, blocks=tower.blocks[: layer % count]), projector, replace(_inside(decoder), tied=tied)
    )


def _gemma3(fields: Fields, seq: int, read: Read) -> ImageTextConfig:
    """Read Gemma 3 (Gemma Team 2025, section 2.1): SigLIP's tower, whose patches are pooled.

    Patches see those before them only, as text does; the model lets those of one image see each other.
    """
    built_as(fields, "Gemma3ForConditionalGeneration")
    decoder = _decoder(_text(fields, "gemma3_text"), seq, read)
    of_vision = _vision(fields, "siglip_vision_model", {})
    of_vision.get("vision_use_head")  # what follows the tower's last norm is not used
    tower = siglip_tower(of_vision, "model.vision_tower.", lambda block: _NO_HEAD)
    _check_read(of_vision)
    assert isinstance(tower.embedding, Patches), "SigLIP embeds patches"
    rows, columns = tower.embedding.grid
    tokens = fields.size("mm_tokens_per_image", default=256)
    side = rows // isqrt(tokens) if isqrt(tokens) <= rows else 0
    if rows != columns or isqrt(tokens) ** 2 != tokens or side * isqrt(tokens) != rows:
        raise UnknownError(f"mm_tokens_per_image={tokens} of {rows} x {columns} patches")
    projector = Pooled(
        side, Norm("rms", tower.norm.epsilon, from_zero=True), "model.multi_modal_projector.mm_soft_emb_norm",
        "model.multi_modal_projector.mm_input_projection_weight",
    )  # fmt: skip
    tied = fields.flag("tie_word_embeddings", True)
    return ImageTextConfig(
        tower, projector, replace(_inside(decoder), tied=tied), norm="model.vision_tower.post_layernorm"
    )


def _llama4(fields: Fields, seq: int, read: Read) -> ImageTextConfig:
    built_as(fields, "Llama4ForConditionalGeneration")
    decoder = _decoder(_text(fields, "llama4_text"), seq, read)
    of_vision = _vision(fields, "llama4_vision_model", {})
    prefix = "vision_model."
    hidden, heads = of_vision.size("hidden_size", default=768), of_vision.size("num_attention_heads", default=16)
    image, patch = of_vision.size("image_size", default=448), of_vision.size("patch_size", default=14)
    for name, known in (
        ("hidden_act", "gelu"), ("vision_feature_select_strategy", "default"), ("pixel_shuffle_ratio", 0.5),
        ("multi_modal_projector_bias", False),
    ):  # fmt: skip
        if of_vision.get(name, default=known) != known:
            raise UnknownError(f"vision_config with {name}={of_vision.get(name)!r}")
    _check_read(of_vision)
    size = hidden // heads
    if size * heads != hidden or size % 4:
        raise ModelError(
            f"hidden_size {hidden} of vision_config is not a multiple of 4 for each of its {heads} heads",
            hint="correct hidden_size or num_attention_heads",
        )
    patches = Patches(
        of_vision.size("num_channels", default=3), (image, image), (patch, patch), bias=False,
        class_token=f"{prefix}class_embedding", class_shape=(hidden,), projection=f"{prefix}patch_embedding.linear",
        positions=f"{prefix}positional_embedding_vlm", positions_rank=2, norm=f"{prefix}layernorm_pre",
        class_last=True, flat_kernel=True,
    )  # fmt: skip
    grid = Grid(*patches.grid, (2,) * (size // 4) + (1,) * (size // 4), first=1, axial=True)
    rope = Rope(_axial_theta(of_vision), size, grid=grid)
    attention = Attention(heads, heads, size, qkv_bias=True, out_bias=True, rope=rope, interleaved=True, causal=False)
    mlp = Mlp(of_vision.size("intermediate_size", default=5632), "gelu", gated=False, bias=True)
    tower = EncoderConfig(
        patches, (Block(attention, mlp),) * of_vision.size("num_hidden_layers", default=34), hidden, patches.seq,
        Norm("layer", 1e-5), "pre",
        Names(
            "", f"{prefix}model.layers.{{}}", "input_layernorm", "post_attention_layernorm",
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.o_proj", ("mlp.fc1", "mlp.fc2"),
            "",
        ),
        _NO_HEAD,
    )  # fmt: skip
    inner = of_vision.size("projector_input_dim", default=4096)
    output = of_vision.size("projector_output_dim", default=4096)
    if {of_vision.size("vision_output_dim", default=7680), inner} != {output}:
        raise UnknownError("projector_input_dim or vision_output_dim unlike projector_output_dim")
    if of_vision.size("intermediate_size", default=5632) != 4 * hidden:
        raise UnknownError("vision_config with an intermediate_size unlike 4 hidden_size")
    projector = PixelShuffle(
        2, inner, output,
        (f"{prefix}vision_adapter.mlp.fc1", f"{prefix}vision_adapter.mlp.fc2", "multi_modal_projector.linear_1"),
    )  # fmt: skip
    names = replace(
        decoder.names, embed=f"language_model.{decoder.names.embed}", layer=f"language_model.{decoder.names.layer}",
        final_norm=f"language_model.{decoder.names.final_norm}", head=f"language_model.{decoder.names.head}",
    )  # fmt: skip
    return ImageTextConfig(tower, projector, replace(decoder, names=names), norm=f"{prefix}layernorm_post")


def _qwen2_vl(fields: Fields, seq: int, read: Read) -> ImageTextConfig:
    """Read Qwen2-VL (Wang et al. 2024), with an image of `image_size` pixels on each side."""
    built_as(fields, "Qwen2VLForConditionalGeneration")
    of_vision = _vision(fields, "qwen2_vl_vision", {"hidden_size": 3584}, "qwen2_vl")
    hidden, heads = of_vision.size("embed_dim", default=1280), of_vision.size("num_heads", default=16)
    width = of_vision.number("mlp_ratio", default=4.0) * hidden
    tower = _qwen_tower(
        of_vision, hidden, heads, Mlp(int(width), activation(of_vision, "hidden_act", default="quick_gelu"),
        gated=False, bias=True), patch=14, image=448, depth=32, bias=False, projections=("mlp.fc1", "mlp.fc2"),
    )  # fmt: skip
    return _with_qwen2(fields, seq, read, of_vision, tower, "hidden_size")


def _qwen2_5_vl(fields: Fields, seq: int, read: Read) -> ImageTextConfig:
    """Read Qwen2.5-VL (Bai et al. 2025, section 2.1.1), with an image of `image_size` pixels on each side.

    Blocks of the tower but for a few see the patches of their window alone.
    """
    built_as(fields, "Qwen2_5_VLForConditionalGeneration")
    of_vision = _vision(fields, "qwen2_5_vl_vision", {}, "qwen2_5_vl")
    hidden, heads = of_vision.size("hidden_size", default=3584), of_vision.size("num_heads", default=16)
    mlp = Mlp(
        of_vision.size("intermediate_size", default=3420), activation(of_vision, "hidden_act", default="silu"),
        bias=True,
    )  # fmt: skip
    tower = _qwen_tower(
        of_vision, hidden, heads, mlp, patch=14, image=448, depth=32, bias=False,
        projections=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), norm="rms",
    )  # fmt: skip
    return _with_qwen2(fields, seq, read, of_vision, _windowed(of_vision, tower), "out_hidden_size")


def _windowed(fields: Fields, tower: EncoderConfig) -> EncoderConfig:
    """Return the tower of a Qwen2.5-VL with windows, which go to the sequence one after the other.

    Raises:
        UnknownError: If windows are not alike, or no multiple of the squares that become tokens.
        ModelError: If the blocks without windows are no list.
    """
    patches, whole = tower.embedding, fields.get("fullatt_block_indexes", default=[7, 15, 23, 31])
    assert isinstance(patches, FlatPatches), "Qwen-VL embeds rows of pixels"
    if not isinstance(whole, list | tuple) or not all(type(layer) is int for layer in whole):
        raise ModelError(
            f"fullatt_block_indexes of the configuration is {whole!r}, not a list of layers", hint="correct it"
        )
    pixels, patch = fields.size("window_size", default=112), fields.size("patch_size", default=14)
    window = pixels // patch // patches.block * patches.block
    if not window:
        raise UnknownError(f"window_size={pixels} below the {patches.block * patch} pixels of a token")
    if max(patches.grid) <= window:
        return tower
    if any(side % window for side in patches.grid):
        raise UnknownError(
            f"an image of {patches.grid[0]} x {patches.grid[1]} patches, whose windows of {window} x {window} are not "
            "alike"
        )
    blocks = []
    for index, block in enumerate(tower.blocks):
        attention = block.attention
        assert isinstance(attention, Attention), "Qwen-VL has grouped attention"
        assert attention.rope is not None, "Qwen-VL has rotary positions"
        assert attention.rope.grid is not None, "which are those of patches"
        rope = replace(attention.rope, grid=replace(attention.rope.grid, window=window))
        chunk = 0 if index in whole else window**2
        blocks.append(replace(block, attention=replace(attention, rope=rope, chunk=chunk)))
    return replace(tower, blocks=tuple(blocks), embedding=replace(patches, window=window))


def _with_qwen2(
    fields: Fields, seq: int, read: Read, of_vision: Fields, tower: EncoderConfig, width: str
) -> ImageTextConfig:
    """Return a Qwen2-VL or Qwen2.5-VL of its tower.

    Args:
        fields: The configuration.
        seq: Tokens per sequence.
        read: Reads the decoder.
        of_vision: The configuration of the tower.
        tower: The tower.
        width: Field of that configuration that states the width of the decoder.
    """
    usual = {
        "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "max_window_layers": 80,
    }  # fmt: skip
    side = of_vision.size("spatial_merge_size", default=2)
    kinds = ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text")
    text = {**usual, **_without_sections(_text(fields, "qwen2", *kinds))}
    sections = _sections(fields, [16, 24, 24])
    coordinates = tuple(axis % 3 for axis, size in enumerate(sections) for _ in range(size))
    decoder = _placed(_decoder(text, seq, read), tower, coordinates, side)
    if of_vision.size(width, default=3584) != decoder.hidden:
        raise UnknownError(
            f"vision_config with {'an' if width[0] in 'aeiou' else 'a'} {width} unlike that of the decoder"
        )
    projector = Merger(
        side, "model.visual.merger.ln_q", False, ("model.visual.merger.mlp.0", "model.visual.merger.mlp.2")
    )
    _check_read(of_vision)
    tied = fields.flag("tie_word_embeddings", False)
    return ImageTextConfig(tower, projector, replace(_inside(decoder), tied=tied))


def _qwen3_vl(fields: Fields, seq: int, read: Read, mixture: bool = False) -> ImageTextConfig:
    """Read Qwen3-VL (Qwen Team 2025), with an image of as many patches as its table of positions has rows."""
    kind = "qwen3_vl_moe" if mixture else "qwen3_vl"
    built_as(fields, f"Qwen3VL{'Moe' if mixture else ''}ForConditionalGeneration")
    of_vision = _vision(fields, f"{kind}_vision", {}, kind)
    hidden, heads = of_vision.size("hidden_size", default=1152), of_vision.size("num_heads", default=16)
    rows, patch = of_vision.size("num_position_embeddings", default=2304), of_vision.size("patch_size", default=16)
    mlp = Mlp(
        of_vision.size("intermediate_size", default=4304),
        activation(of_vision, "hidden_act", default="gelu_pytorch_tanh"), gated=False, bias=True,
    )  # fmt: skip
    tower = _qwen_tower(
        of_vision, hidden, heads, mlp, patch=16, image=isqrt(rows) * patch, depth=27, bias=True,
        projections=("mlp.linear_fc1", "mlp.linear_fc2"), positions="model.visual.pos_embed",
    )  # fmt: skip
    assert isinstance(tower.embedding, FlatPatches), "Qwen-VL embeds rows of pixels"
    if tower.embedding.grid != (isqrt(rows), isqrt(rows)) or isqrt(rows) ** 2 != rows:
        raise UnknownError(
            f"an image of {tower.embedding.grid[0]} x {tower.embedding.grid[1]} patches, for which a table of {rows} "
            "positions is interpolated"
        )
    usual: dict[str, Any] = {"rope_theta": 5e5, "vocab_size": 151936}
    if mixture:
        usual |= {
            "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "hidden_size": 2048,
            "intermediate_size": 5632, "moe_intermediate_size": 1408, "num_experts_per_tok": 4, "num_experts": 60,
            "norm_topk_prob": True,
        }  # fmt: skip
    else:
        usual |= {
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_size": 4096,
            "intermediate_size": 22016, "head_dim": 128,
        }  # fmt: skip
    text = _without_sections(_text(fields, "qwen3_moe" if mixture else "qwen3", f"{kind}_text"))
    sections = _sections(Fields(fields.table("text_config")), [24, 20, 20])
    side = of_vision.size("spatial_merge_size", default=2)
    read_text = _decoder({**usual, **text}, seq, read)
    rope = read_text.blocks[0].rope
    assert rope is not None, "Qwen has rotary positions"
    ends = [3 * size for size in sections]
    coordinates = tuple(
        index % 3 if index % 3 and index < ends[index % 3] else 0 for index in range(rope.size // 2)
    )  # fmt: skip
    decoder = _placed(read_text, tower, coordinates, side)
    if of_vision.size("out_hidden_size", default=3584) != decoder.hidden:
        raise UnknownError("vision_config with an out_hidden_size unlike the hidden_size of the decoder")
    tapped = of_vision.get("deepstack_visual_indexes", default=[8, 16, 24])
    if not isinstance(tapped, list) or not all(type(layer) is int and layer >= 0 for layer in tapped):
        raise ModelError(
            f"deepstack_visual_indexes of the configuration is {tapped!r}, not a list of layers", hint="correct it"
        )

    def merger(name: str, behind: bool) -> Merger:
        return Merger(side, f"{name}.norm", behind, (f"{name}.linear_fc1", f"{name}.linear_fc2"))

    taps = (
        Tap(layer, merger(f"model.visual.deepstack_merger_list.{number}", True)) for number, layer in enumerate(tapped)
    )
    _check_read(of_vision)
    tied = fields.flag("tie_word_embeddings", False)
    return ImageTextConfig(
        tower, merger("model.visual.merger", False), replace(_inside(decoder), tied=tied), taps=tuple(taps)
    )


def _qwen_tower(
    fields: Fields, hidden: int, heads: int, mlp: Mlp, *, patch: int, image: int, depth: int, bias: bool,
    projections: tuple[str, ...], positions: str = "", norm: Literal["rms", "layer"] = "layer",
) -> EncoderConfig:  # fmt: skip
    """Read the vision tower of a Qwen-VL.

    Args:
        fields: Its configuration.
        hidden: Its width.
        heads: Its heads.
        mlp: Its MLP.
        patch: Default of the pixels of a patch's side.
        image: Default of the pixels of an image's side, `image_size`, a field of our own.
        depth: Default of the number of blocks.
        bias: Whether the embedding of patches has a bias.
        projections: Names of the MLP's projections.
        positions: Name of the table of positions; "" without.
        norm: Every norm.
    """
    patch = fields.size("patch_size", default=patch)
    moments = fields.size("temporal_patch_size", default=2)
    side = fields.size("image_size", default=image) // patch
    if not side:
        raise ModelError(f"image_size of vision_config holds no patch of {patch} pixels", hint="correct it")
    size = hidden // heads
    if size * heads != hidden or size % 4:
        raise ModelError(
            f"width {hidden} of vision_config is not a multiple of 4 for each of its {heads} heads",
            hint="correct the width or num_heads",
        )
    pixels = fields.size("in_channels", "in_chans", default=3) * moments * patch**2
    block = fields.size("spatial_merge_size", default=2)
    patches = FlatPatches(pixels, (side, side), block, "model.visual.patch_embed.proj", bias, positions)
    grid = Grid(side, side, (1,) * (size // 4) + (2,) * (size // 4), block, axial=True)
    attention = Attention(
        heads, heads, size, fused="blocks", qkv_bias=True, out_bias=True, causal=False,
        rope=Rope(_axial_theta(fields), size, grid=grid),
    )  # fmt: skip
    return EncoderConfig(
        patches, (Block(attention, mlp),) * fields.size("depth", default=depth), hidden, patches.seq,
        Norm(norm, 1e-6), "pre",
        Names("", "model.visual.blocks.{}", "norm1", "norm2", ("attn.qkv",), "attn.proj", projections, ""), _NO_HEAD,
    )  # fmt: skip


def _axial_theta(fields: Fields) -> float:
    """Return the base of the frequencies of rows and columns.

    Raises:
        UnknownError: If they are of another kind.
    """
    table = Fields(fields.table("rope_parameters"))
    if table.get("rope_type", default="axial") not in ("axial", "default"):
        raise UnknownError(f"vision_config with rope_type={table.get('rope_type')!r}")
    return table.number("rope_theta", default=fields.number("rope_theta", default=1e4))


def _vision(fields: Fields, kind: str, usual: Mapping[str, Any], *others: str) -> Fields:
    """Return the configuration of the tower.

    Args:
        fields: The configuration.
        kind: Its `model_type`.
        usual: Defaults of its fields.
        *others: Further names of that type.

    Raises:
        UnknownError: If it is of another type.
    """
    vision = {**usual, **fields.table("vision_config")}
    if vision.setdefault("model_type", kind) not in (kind, *others):
        raise UnknownError(f"vision_config with model_type={vision['model_type']!r}")
    return Fields(vision)


def _check_read(of_vision: Fields) -> None:
    """Check that nothing else changes the tower.

    Raises:
        UnknownError: If something does.
    """
    if of_vision.unread():
        raise UnknownError(f"vision_config with {of_vision.unread()}")


def _text(fields: Fields, kind: str, *others: str) -> dict[str, Any]:
    """Return the configuration of the decoder: `text_config`, or what stands beside `vision_config`.

    Args:
        fields: The configuration.
        kind: The `model_type` it is read as.
        *others: Names of that type within the whole.
    """
    text = dict(fields.table("text_config"))
    if not text and "hidden_size" in fields.values:
        text = {name: value for name, value in fields.values.items() if name not in ("vision_config", "architectures")}
    if text.setdefault("model_type", kind) in others:
        text["model_type"] = kind
    return text


def _decoder(text: Mapping[str, Any], seq: int, read: Read) -> DecoderConfig:
    """Return the decoder of a configuration.

    Raises:
        UnknownError: If builders do not make it, or it is no decoder.
    """
    decoder = read(text, seq)
    if isinstance(decoder, Unbuilt):
        raise UnknownError(f"text_config with {decoder.reason}")
    if not isinstance(decoder, DecoderConfig):
        raise UnknownError(f"text_config with model_type={text['model_type']!r}, which is no decoder")
    return decoder


_SECTIONS = ("mrope_section", "mrope_interleaved")


def _sections(fields: Fields, default: list[int]) -> list[int]:
    """Return how many frequencies turn by time, row and column.

    Raises:
        UnknownError: If they are no three numbers.
    """
    tables = [fields.table("text_config"), fields.values]
    scalings = [Fields(table).table(name) for table in tables for name in ("rope_parameters", "rope_scaling")]
    sections = next((table["mrope_section"] for table in scalings if "mrope_section" in table), default)
    if not isinstance(sections, list) or len(sections) != 3 or not all(type(size) is int for size in sections):
        raise UnknownError(f"mrope_section={sections!r}")
    return sections


def _without_sections(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a decoder without what says that positions have three coordinates."""
    found = dict(text)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(found.get(name), dict):
            table = {key: value for key, value in found[name].items() if key not in _SECTIONS}
            kinds = {key: "default" for key in ("type", "rope_type") if table.get(key) == "mrope"}
            found[name] = {**table, **kinds}
    return found


def _placed(decoder: DecoderConfig, tower: EncoderConfig, coordinates: tuple[int, ...], side: int) -> DecoderConfig:
    """Return a decoder whose first tokens are those of an image, with places by row and column.

    Args:
        decoder: The decoder.
        tower: What makes them.
        coordinates: As of `Grid`.
        side: Patches of the side of a square that becomes one token.

    Raises:
        UnknownError: If there is not one coordinate per frequency.
    """
    assert isinstance(tower.embedding, FlatPatches), "Qwen-VL embeds rows of pixels"
    rows, columns = (length // side for length in tower.embedding.grid)
    if rows * columns >= decoder.seq:
        raise ModelError(
            f"a sequence of {decoder.seq} tokens has no room for text behind the {rows * columns} of an image",
            hint=f"--set seq={2 * rows * columns}, tokens per sequence with those of the image",
        )
    grid = Grid(rows, columns, coordinates, then_text=True)
    blocks = []
    for block in decoder.blocks:
        assert isinstance(block.attention, Attention), "Qwen has grouped attention"
        assert block.attention.rope is not None, "Qwen has rotary positions"
        if len(coordinates) != block.attention.rope.size // 2:
            raise UnknownError(
                f"mrope_section of {len(coordinates)} frequencies, where heads have {block.attention.rope.size // 2}"
            )
        turned = replace(block.attention.rope, grid=grid)
        blocks.append(replace(block, attention=replace(block.attention, rope=turned)))
    return replace(decoder, blocks=tuple(blocks))


def _inside(decoder: DecoderConfig) -> DecoderConfig:
    """Return a decoder whose weights are called as inside a model of images and text."""
    names = decoder.names

    def inner(name: str) -> str:
        return f"model.language_model.{name.removeprefix('model.')}" if name else name

    names = replace(
        names, embed=inner(names.embed), layer=inner(names.layer), final_norm=inner(names.final_norm),
        positions=inner(names.positions),
    )  # fmt: skip
    return replace(decoder, names=names)


def _qwen3_vl_moe(fields: Fields, seq: int, read: Read) -> ImageTextConfig:
    return _qwen3_vl(fields, seq, read, mixture=True)


IMAGE_TEXT: Mapping[str, Callable[[Fields, int, Read], ImageTextConfig]] = {
    "gemma3": _gemma3,
    "llama4": _llama4,
    "llava": _llava,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen2_vl": _qwen2_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
}
"""Reader of each `model_type`; it is given what reads the decoder."""

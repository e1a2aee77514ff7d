"""Fields that a row leaves out: read from what its source says elsewhere, filled from its recipe, or derived.

In this order, and no field that a row states is changed:

1. `as_published` holds what the source says in fields of its own: gradient accumulation, sequences per device, degrees
   per stage, whether embedding and head count as layers of the pipeline.
2. The table of recipes (`autopar.validation.recipes`) holds what the software implies.
3. Arithmetic: the degrees multiply to the devices, and devices, microbatches and their size to the global batch.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from autopar.validation.recipes import recipes_of
from autopar.validation.records import Row

_NOT_STATED = ("not recorded", "not stated", "unknown")
_REDONE = 0.9
"""Share of a stage's ops from which on its recompute counts as full."""


class InexpressibleError(Exception):
    """A row says too little, or what the zoo or the cost model do not know; the message says what."""


@dataclass(slots=True)
class _Draft:
    """A row on its way to completion.

    Attributes:
        row: The row so far.
        notes: What was filled in, and from where.
    """

    row: Row
    notes: list[str] = field(default_factory=list)

    def fill(self, note: str, **values: Any) -> None:
        """Set those of the fields that the row leaves out, with one note for all."""
        missing = {
            name: value for name, value in values.items() if value is not None and getattr(self.row, name) is None
        }
        if missing:
            self.row = msgspec.structs.replace(self.row, **missing)
            if note:
                self.notes.append(note)


def complete(row: Row) -> tuple[Row, tuple[str, ...]]:
    """Return a row with the fields it leaves out, and what was assumed or derived to fill them.

    Raises:
        InexpressibleError: If stages differ in what degrees say of all, or the recipe has several values for a field.
    """
    draft = _Draft(row)
    if any(text in (row.recompute or "") for text in _NOT_STATED):
        draft.row = msgspec.structs.replace(row, recompute=None)
    if re.search(_HIDES_TP, row.notes or "", re.IGNORECASE):
        draft.fill("", hides_tp=True)
    _read_published(draft)
    _follow_recipes(draft)
    _derive(draft)
    return draft.row, tuple(draft.notes)


def _read_published(draft: _Draft) -> None:
    said = draft.row.as_published or {}
    if "input_len" in said:
        raise InexpressibleError("measures inference, not a step of training")
    draft.fill("", etp=said.get("etp"), num_microbatches=_whole(said.get("grad_accum")))
    if said.get("fsdp"):
        draft.fill("", zero=3)
    elif said.get("fsdp") is False:
        draft.fill("", zero=0)
    _read_features(draft, " ".join(str(said.get(name, "")) for name in ("features", "kernels", "moe")))
    if said.get("flash_attention") is False:
        draft.fill("", attention="unfused")
    local = _whole(said.get("local_batch"))
    if local and draft.row.dp and draft.row.global_batch is None:
        draft.fill("one microbatch per device and step", global_batch=local * draft.row.dp)
    if local and (draft.row.pp or 1) == 1:
        draft.fill("", micro_batch=local)
    _read_stages(draft, said)


_FEATURES: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"deepep|hybridep", {"dispatch": "per-node"}),
    (r"alltoall dispatcher", {"dispatch": "all-to-all"}),
    (r"ep overlap", {"hides_dispatch": True}),
    (r"full cg", {"graphs": "full"}),
    (r"\bcg\b", {"graphs": "partial"}),
)
"""Patterns of what a source calls the features of a run, and the fields that they fill."""
_HIDES_TP = r"async.?tp|tp comm overlap on"
"""Pattern of notes about a run that hid collectives of tensor parallelism behind products."""


def _read_features(draft: _Draft, text: str) -> None:
    for pattern, values in _FEATURES:
        if re.search(pattern, text, re.IGNORECASE):
            draft.fill("", **values)


def _whole(value: object) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _alike(name: str, values: Sequence[Any]) -> int:
    """Return the one value of all stages.

    Raises:
        InexpressibleError: If stages differ.
    """
    found = {tuple(value) if isinstance(value, list) else (value,) for value in values}
    if len(found) > 1 or len(next(iter(found))) > 1:
        raise InexpressibleError(f"stages differ in {name}")
    return int(next(iter(found))[0])


def _read_stages(draft: _Draft, said: dict[str, Any]) -> None:
    """Read degrees that are stated per stage, as Aceso and Mist do."""
    if "tp_per_stage" in said:
        _alike("devices", said["num_gpus_per_stage"])
        draft.fill("", tp=_alike("tp", said["tp_per_stage"]), dp=_alike("dp", said["dp_per_stage"]), cp=1)
        shares = said["recompute_op_fraction_per_stage"]
        if min(shares) < _REDONE and max(shares) > 0:
            raise InexpressibleError("stages recompute different parts of their ops")
        draft.fill("", recompute="none" if max(shares) == 0 else "full")
    if "stages" in said:
        names = said["stage_strategy_fields"].split(",")
        stages = [dict(zip(names, stage, strict=True)) for stage in said["stages"]]
        if any(stage[name] for stage in stages for name in ("off_w", "off_g", "off_o", "off_a")):
            raise InexpressibleError("offloads a part of the states of each stage")
        if len({count > 0 for count in said["recompute_layers_per_stage"]}) > 1 or (
            any(said["recompute_layers_per_stage"]) and said["recompute_layers_per_stage"] != said["layers_per_stage"]
        ):
            raise InexpressibleError("stages recompute different numbers of layers")
        draft.fill(
            "",
            tp=_alike("tp", [stage["tp"] for stage in stages]),
            dp=_alike("dp", [stage["dp"] for stage in stages]),
            micro_batch=_alike("micro batch", [stage["micro_batch"] for stage in stages]),
            zero=_alike("sharding", [_zero(stage) for stage in stages]),
            recompute="full" if any(said["recompute_layers_per_stage"]) else "none",
            stage_layers=tuple(said["layers_per_stage"]),
        )


def _zero(stage: dict[str, float]) -> int:
    return 3 if stage["shard_weights"] else 2 if stage["shard_grads"] else 1 if stage["shard_opt"] else 0


def _follow_recipes(draft: _Draft) -> None:
    leaves_open: dict[str, str] = {}
    for recipe in recipes_of(draft.row):
        draft.fill(f"recipe: {recipe.name}", **recipe.fills)
        leaves_open.update((name, recipe.name) for name in recipe.leaves_open)
    for name, recipe_name in leaves_open.items():
        if getattr(draft.row, name) is None:
            raise InexpressibleError(f"does not state {name}, which recipe {recipe_name!r} leaves open")


_CHUNK_LAYERS = r"vpp layers/stage=(\d+)"
"""Pattern of notes that state the layers of an interleaved stage (`--num-layers-per-virtual-pipeline-stage`)."""


def _derive(draft: _Draft) -> None:
    row = draft.row
    chunk = re.search(_CHUNK_LAYERS, row.notes or "")
    if chunk and row.layers and row.pp and row.layers % (row.pp * int(chunk[1])) == 0:
        draft.fill("interleaved stages from their layers", vpp=row.layers // (row.pp * int(chunk[1])))
    if row.dp is None and row.global_batch and row.num_microbatches and row.micro_batch:
        dp, rest = divmod(row.global_batch, row.num_microbatches * row.micro_batch)
        if rest == 0:
            draft.fill("dp from global batch, microbatches and their size", dp=dp)
    if row.n_gpus and draft.row.dp == row.n_gpus:
        draft.fill("all devices are data-parallel", tp=1, pp=1)
    row = draft.row
    if not (row.n_gpus and row.dp and row.ep and row.tp and row.pp):
        return
    copies = row.dp * row.tp * row.pp * (row.cp or 1)
    if copies != row.n_gpus and copies * row.ep == row.n_gpus:
        draft.row = msgspec.structs.replace(row, dp=row.dp * row.ep)
        draft.notes.append("dp as stated counts copies of the experts")

"""Adapters as they are written down: `rank=16,targets=attention` on a command line, or peft's `adapter_config.json`.

Fields of peft that change neither the trained parameters nor the products are passed over (initial values, dropout,
which no graph here has). Of the others those are known that a `Lora` can say; any that is set besides is an error.
"""

from pathlib import Path
from typing import Any

from autopar.errors import JobError
from autopar.reading import UnreadableError, parse_json
from autopar.training.lora import GROUPS, NF4, PATTERN, Lora

ADAPTER_CONFIG = "adapter_config.json"
"""Name under which peft saves a configuration."""
NO_LORA = "none"
"""What says that there are no adapters, also where a configuration lies beside the model."""
_HINT = (
    f"write --lora rank=16,alpha=32,targets={'|'.join(GROUPS)}|NAME:NAME, pattern=REGEX last in place of targets, or "
    f"give peft's {ADAPTER_CONFIG}"
)
_KEYS = ("rank", "alpha", "targets", "rslora", "base", "shared")
_READ = frozenset({"peft_type", "r", "lora_alpha", "target_modules", "use_rslora", "bias"})
_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "fan_in_fan_out",
        "inference_mode", "init_lora_weights", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config",
        "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
    }
)  # fmt: skip
"""Fields of peft's LoraConfig for bookkeeping, initial values and dropout."""


def read_lora(given: "str | Path | Lora | None") -> Lora | None:
    """Return adapters; None if there are none.

    Args:
        given: A record, text such as `rank=16,targets=q:v`, the path of an `adapter_config.json` or of its folder, ""
            or "none".

    Raises:
        JobError: If it is written otherwise, or says what is not known.
    """
    if given is None or isinstance(given, Lora):
        return given
    text = str(given).strip()
    if text in ("", NO_LORA):
        return None
    path = Path(text)
    if "=" in text and not path.exists():
        return _parse(text)
    return read_adapter_config(path)


def _parse(text: str) -> Lora:
    """Return adapters written as `key=value`, with commas between them; a pattern is the last."""
    found: dict[str, str] = {}
    text, has_pattern, pattern = text.partition(f",{PATTERN}")
    if text.startswith(PATTERN):
        text, has_pattern, pattern = "", PATTERN, text.removeprefix(PATTERN) + has_pattern + pattern
    if has_pattern and not pattern:
        raise JobError("LoRA with an empty pattern", hint=_HINT)
    for part in text.split(",") if text else ():
        key, equals, value = (word.strip() for word in part.partition("="))
        if key not in _KEYS or not equals or not value or key in found:
            raise JobError(f"{part!r} says nothing of LoRA, or says it twice", hint=_HINT)
        found[key] = value
    if pattern and "targets" in found:
        raise JobError("LoRA with both targets and a pattern", hint="say which modules are adapted in one way")
    return Lora(
        int(_number(found.get("rank", "8"), "rank")),
        _number(found.get("alpha", "8"), "alpha"),
        tuple(name.strip() for name in found.get("targets", "all").split(":")),
        _truth(found, "rslora"),
        found.get("base", ""),
        pattern,
        _truth(found, "shared"),
    )


def _truth(found: dict[str, str], key: str) -> bool:
    text = found.get(key, "false").lower()
    if text not in ("true", "false"):
        raise JobError(f"{key}={text}", hint=f"{key} takes true or false")
    return text == "true"


def _number(text: str, key: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise JobError(f"{key}={text} is no number", hint=_HINT) from None
    if key == "rank" and not number.is_integer():
        raise JobError(f"rank={text} is not whole", hint=_HINT)
    return number


def read_adapter_config(path: str | Path) -> Lora:
    """Return the adapters of a configuration of peft.

    Args:
        path: The file, or the folder with an `adapter_config.json`.

    Raises:
        JobError: If there is none, it is no LoRA, or a field is set that changes the model and is not known.
    """
    file = Path(path) / ADAPTER_CONFIG if Path(path).is_dir() else Path(path)
    try:
        config = parse_json(file.read_bytes(), foreign=True)
    except OSError as error:
        raise JobError(f"{file} cannot be read: {error.strerror}", hint=_HINT) from None
    except UnreadableError as error:
        raise JobError(f"{file} is no JSON: {error}", hint=_HINT) from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise JobError(f"{file} is no LoRA configuration of peft (peft_type LORA)", hint=_HINT)
    unknown = [name for name, value in config.items() if name not in _READ | _WITHOUT_EFFECT and _is_set(value)]
    if config.get("bias", "none") != "none":
        unknown.append("bias")
    if unknown:
        listed = ", ".join(f"{name}={config[name]!r}" for name in unknown)
        raise JobError(f"{file} sets {listed}, of which nothing is known", hint="leave it out of the configuration")
    rank, alpha = config.get("r", 8), config.get("lora_alpha", 8)
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise JobError(f"{file}: r is {rank!r}", hint="r is a whole number from 1 on")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise JobError(f"{file}: lora_alpha is {alpha!r}", hint="lora_alpha is a number above 0")
    targets, is_stabilised = config.get("target_modules"), bool(config.get("use_rslora"))
    if isinstance(targets, str) and targets and targets != "all-linear":  # peft: a regular expression
        return Lora(rank, float(alpha), rank_stabilised=is_stabilised, pattern=targets)
    return Lora(rank, float(alpha), _modules(targets, file), is_stabilised)


def _modules(given: Any, file: Path) -> tuple[str, ...]:
    """Return the targets of a configuration."""
    if given == "all-linear":
        return ("all",)
    if isinstance(given, list) and given and all(isinstance(name, str) for name in given):
        return tuple(sorted(given))  # peft writes a set
    raise JobError(
        f"{file}: target_modules is {given!r}, no list of names and no regular expression",
        hint='write target_modules as a list, such as ["q_proj", "v_proj"], or "all-linear"',
    )


def _is_set(value: Any) -> bool:
    return value not in (None, False, 0, "", [], {})


__all__ = ["ADAPTER_CONFIG", "NF4", "NO_LORA", "read_adapter_config", "read_lora"]

"""Which software stack a framework on a device is: a table of patterns, first match first."""

import re

from autopar.cost import bundled_stacks

STACKS = (
    (r"zero-bubble", r"A100", "zero-bubble-a100"),
    (r"megatron-deepspeed.*bloom", r"A100", "bloom-a100"),
    (r"megatron-deepspeed", r"A100", "megatron-deepspeed-a100"),
    (r"deepspeed zero-3|megatron-lm|megascale", r"A100", "megatron-a100"),
    (r"megatron-lm", r"V100", "megatron-v100"),
    (r"alpa", r"V100", "alpa-v100"),
    (r"compile|torchtitan", r"H[12]00", "fsdp-compile-h100"),
    (r"compile", r"A100", "fsdp-compile-a100"),
    (r"fsdp|composer", r"A100", "fsdp-eager-a100"),
    (r"fsdp|composer", r"H100", "fsdp-eager-h100"),
    (r"internevo", r"A100", "internevo-a100"),
    (r"megatron", r"H[12]00", "megatron-h100"),
    (r"megatron", r"A100", "megatron-a100"),
    (r"megatron", r"B200", "megatron-b200"),
)
"""Pattern of the framework, pattern of the device, stack."""

DEFAULT_STACK = "default"


def wanted_stack(framework: str, device: str) -> str:
    """Return the stack that is meant for a framework on a device, whether or not it is bundled.

    >>> wanted_stack("Megatron-DeepSpeed (PyTorch 2.0.1)", "A100-SXM-80GB")
    'megatron-deepspeed-a100'
    """
    for framework_pattern, device_pattern, name in STACKS:
        if re.search(framework_pattern, framework, re.IGNORECASE) and re.search(device_pattern, device, re.IGNORECASE):
            return name
    return DEFAULT_STACK


def stack_name(framework: str, device: str) -> str:
    """Return the stack a framework on a device is predicted with: the one meant for it, else the default."""
    name = wanted_stack(framework, device)
    return name if name in bundled_stacks() else DEFAULT_STACK

"""A forward graph becomes a training step: loss, backward pass by VJP rules, gradient accumulation, optimizer."""

from autopar.training.adapter_config import ADAPTER_CONFIG, NO_LORA, read_adapter_config, read_lora
from autopar.training.lora import Lora, add_adapters
from autopar.training.losses import LOSS_SCALE, LOSSES
from autopar.training.optimizers import OPTIMIZERS, Optimizer
from autopar.training.step import STEP, training_step
from autopar.training.vjps import CONSTANT_KINDS, VJPS

__all__ = [
    "ADAPTER_CONFIG", "CONSTANT_KINDS", "LOSSES", "LOSS_SCALE", "NO_LORA", "OPTIMIZERS", "STEP", "VJPS", "Lora",
    "Optimizer",
    "add_adapters", "read_adapter_config", "read_lora", "training_step",
]  # fmt: skip

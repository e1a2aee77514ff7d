"""A forward graph becomes a training step: loss, backward pass by VJP rules, gradient accumulation, optimizer."""

from autopar.training.losses import LOSS_SCALE, LOSSES
from autopar.training.optimizers import OPTIMIZERS, Optimizer
from autopar.training.step import STEP, training_step
from autopar.training.vjps import CONSTANT_KINDS, VJPS

__all__ = ["CONSTANT_KINDS", "LOSSES", "LOSS_SCALE", "OPTIMIZERS", "STEP", "VJPS", "Optimizer", "training_step"]

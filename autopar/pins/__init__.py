"""What a user pins or forbids: records, files, the space that is left, and the check that a plan keeps to it."""

from autopar.pins.apply import constrain
from autopar.pins.files import format_pins, load_pins, pins_from, read_pins
from autopar.pins.plan_check import broken
from autopar.pins.reading import pins_of
from autopar.pins.records import BlockOffload, BlockRecompute, Choices, Item, Pins
from autopar.pins.space import Frame
from autopar.pins.unequal import unequal_left

__all__ = [
    "BlockOffload",
    "BlockRecompute",
    "Choices",
    "Frame",
    "Item",
    "Pins",
    "broken",
    "constrain",
    "format_pins",
    "load_pins",
    "pins_from",
    "pins_of",
    "read_pins",
    "unequal_left",
]

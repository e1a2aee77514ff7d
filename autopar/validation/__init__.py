"""Predictions held against published measurements, and stacks calibrated on a part of them."""

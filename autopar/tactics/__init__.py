"""Tactics."""

"""The lowered plan: per-stage SPMD instructions with explicit collectives."""

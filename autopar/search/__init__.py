"""The outer choices: pipeline degree, mesh, microbatches, stages, recompute."""

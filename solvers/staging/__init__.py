"""Solvers of `autopar.staging`: which blocks, devices and meshes each stage of a pipeline gets."""

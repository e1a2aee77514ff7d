"""Solvers that enumerate: the oracle of the tests, and convex objectives of several sums."""

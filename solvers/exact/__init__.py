"""Exact solvers beside the default: enumeration, the oracle of the tests, and the integer program of an aggregate."""

"""Exact reductions of a problem: what they remove is put back by their inverse."""

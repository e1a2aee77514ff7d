"""Profiles: the distinct events of plans, found and timed on the machine at hand."""

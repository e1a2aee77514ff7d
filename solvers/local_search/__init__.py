"""Heuristics that look for a good choice: repair, descent, neighbourhoods, beams."""

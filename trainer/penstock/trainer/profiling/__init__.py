"""Measures a machine for the planner: units, links, reductions, the optimizer and memory."""

"""Measuring a machine: the costs of units, links, reductions, the optimizer and memory, for the planner."""

"""The thought: costs, memory, slicing, stages, schedules, simulation and search."""

"""The planner: costs, memory, slicing, stages, schedules, simulation and search."""

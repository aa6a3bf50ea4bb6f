"""Schedules as pure functions of integers: built-in, user-defined and imported ones, by name and version."""

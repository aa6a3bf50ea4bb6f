"""Schedules as pure functions of integers, by name and version: built-in, installed and imported ones."""

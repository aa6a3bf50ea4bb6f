"""Prometheus metrics of a service: its jobs, from the database, and its own work."""

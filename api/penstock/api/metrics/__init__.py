"""Prometheus metrics of a service: its jobs by the database, and its own work."""

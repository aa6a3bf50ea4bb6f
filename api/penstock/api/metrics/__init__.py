"""What Prometheus reads of a service: its jobs as the database has them, and what it did itself."""

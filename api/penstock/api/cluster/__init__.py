"""The service on a cluster: jobs are there, and this mirrors them, submits them, and hears from their pods."""

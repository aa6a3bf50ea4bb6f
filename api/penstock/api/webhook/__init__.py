"""Webhook: a call to a URL of the administrator's choice when a job has ended."""

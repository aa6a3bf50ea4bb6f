"""Asking: the REST service, its store, its local executor, its pages and its client."""

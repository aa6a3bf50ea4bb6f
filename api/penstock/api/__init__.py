"""Asking: the REST service, its store, its local executor and its pages, and how it is started and administered."""

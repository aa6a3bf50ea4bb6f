"""The REST service, its store, its local executor and its pages, with its start and administration."""

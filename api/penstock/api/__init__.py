"""REST service with its store, local executor and pages, its start and its administration."""

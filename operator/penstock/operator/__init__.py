"""Kubernetes operator for PipelineJobs: it observes, `penstock.core.lifecycle` decides, and it applies."""

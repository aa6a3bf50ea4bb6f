"""Runs PipelineJobs on Kubernetes: observes, lets `penstock.core.lifecycle` decide, and applies."""

"""Placing: PipelineJobs on a Kubernetes cluster, observed, decided by core's life cycle, and acted upon."""

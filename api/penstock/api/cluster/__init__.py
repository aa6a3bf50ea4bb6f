"""Service on a cluster: it mirrors the cluster's jobs, submits new ones, and receives reports of their pods."""

"""Kubernetes API access for all components: transport, watches, and the names that penstock uses in a cluster."""

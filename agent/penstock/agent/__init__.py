"""Programs next to the ranks, in a pod and under the service: they start, watch and stop ranks, and upload records."""

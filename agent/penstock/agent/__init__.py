"""Programs that start, watch and stop ranks, and upload records: in a pod, under the service, under `penstock run`."""

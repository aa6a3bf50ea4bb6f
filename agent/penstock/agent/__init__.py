"""What runs next to the ranks, in a pod and under the service: starts, watches and stops them, brings their records."""

"""The line to a cluster, for whoever talks to one: transport, watches, and what penstock calls things there."""

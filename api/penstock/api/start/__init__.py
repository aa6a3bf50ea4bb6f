"""Start of the service on a machine or a cluster, its web server, its background work, and administration of its
database while it is stopped.
"""

"""Starting the service on a machine or a cluster, its web server, its background work, and administering its
database without it.
"""

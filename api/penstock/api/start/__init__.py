"""Starting the service on a machine or a cluster, its web server, what it does in the background, and administering its
database without it.
"""

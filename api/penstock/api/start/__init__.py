"""Starting the service, on this machine or on a cluster, and administering its database without it."""

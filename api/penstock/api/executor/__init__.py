"""Running jobs on this machine: observe each, decide by the life cycle, and act."""

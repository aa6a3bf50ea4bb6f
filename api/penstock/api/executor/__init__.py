"""Running jobs on this machine: look at each, ask the life cycle what to do, and do it."""

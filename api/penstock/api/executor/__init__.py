"""Execution of jobs on this machine: observe each job, decide by the life cycle, and act."""

"""The words: models, jobs, plans, schedules and timelines as plain data. Standard library only, no I/O."""

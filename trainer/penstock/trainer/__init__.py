"""The running: stages, communication, data, checkpoints and measurement."""

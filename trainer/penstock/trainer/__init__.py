"""Training on real devices: stages, communication, data, checkpoints and measurement."""

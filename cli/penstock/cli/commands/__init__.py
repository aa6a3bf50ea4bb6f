"""The commands, one module per group; each loads what it needs when it is called."""

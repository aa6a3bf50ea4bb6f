"""Commands, one module per group. Each command imports its dependencies when it is called."""

"""Reading and writing: YAML, and files that are always complete."""

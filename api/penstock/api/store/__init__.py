"""What the service remembers: tables, the one writer, and what is asked of both."""

"""The store of the service: tables, the one writer, and queries."""

"""Store of the service: tables, the single writer, and queries."""

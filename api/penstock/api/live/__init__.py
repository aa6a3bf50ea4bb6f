"""Live streams: one reader of changes for all listeners, and Server-Sent Events."""

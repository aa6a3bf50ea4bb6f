"""Live streams: one reader of changes for all who listen, and Server-Sent Events."""

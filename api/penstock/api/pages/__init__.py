"""Web pages: rendered on the server from the store, and kept up to date by one small script."""

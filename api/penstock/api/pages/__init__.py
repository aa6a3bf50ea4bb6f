"""The pages for people: rendered on the server from the store, kept up to date by one small script."""

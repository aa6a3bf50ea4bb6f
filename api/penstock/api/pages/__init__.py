"""The pages people look at: written on the server from what the store says, kept up to date by one small script."""

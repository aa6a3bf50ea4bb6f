"""The files of a run, as all who write or read them know them."""

"""The files of a run, for all programs that write or read them."""

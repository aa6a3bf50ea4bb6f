"""The files of a run: listed, read, and made into exports."""

"""Files of a run: listing, reading and exports."""

"""What this machine has: ports, network interfaces, locks, signals, the folder of caches, and what of penstock."""

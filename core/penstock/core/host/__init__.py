"""Resources of this machine: ports, network interfaces, locks, signals, the cache folder, and installed members."""

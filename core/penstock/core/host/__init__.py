"""Resources of this machine: capacity, launches, ports, network interfaces, locks, signals, clocks, the cache folder,
and installed members.
"""

"""What this machine is: its ports and network interfaces."""

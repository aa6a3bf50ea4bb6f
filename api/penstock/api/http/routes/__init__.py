"""What can be asked, a module for each kind of thing."""

"""An old name of `penstock.planner.worker`, to be started by; it goes with the next release."""

"""The former name of `penstock.planner.worker`, by which version 0.1.0 starts it; to be removed in the next release."""

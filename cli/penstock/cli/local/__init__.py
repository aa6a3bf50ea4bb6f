"""Commands' work on this machine: plans, runs, measurements, reports. Commands import it late: it needs the agent."""

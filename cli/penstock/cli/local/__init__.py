"""Work of commands on this machine: plans, runs, profiles, reports. Commands import it late: it needs the agent."""

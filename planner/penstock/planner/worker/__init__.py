"""Planning beside: questions to the planner, answered in processes that can be limited and ended."""

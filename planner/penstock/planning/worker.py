"""``python -m penstock.planning.worker``: the command with which version 0.1.0 starts the planning process."""

from __future__ import annotations

from penstock.planner.worker.__main__ import main

if __name__ == "__main__":
    main()

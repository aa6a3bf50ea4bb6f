"""``python -m penstock.planning.worker``: as version 0.1.0 starts the process that plans."""

from __future__ import annotations

from penstock.planner.worker.__main__ import main

if __name__ == "__main__":
    main()

"""``python -m penstock.cli.probe``: name by which supervisors of version 0.1.0 start `penstock.trainer.probe`."""

from __future__ import annotations

if __name__ == "__main__":
    from penstock.trainer.probe import main

    main()

"""``python -m penstock.cli.probe``: as supervisors of version 0.1.0 start what is `penstock.trainer.probe` now."""

from __future__ import annotations

if __name__ == "__main__":
    from penstock.trainer.probe import main

    main()

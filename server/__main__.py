"""`python -m octavo.server`: the same as the command `octavo`."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main()

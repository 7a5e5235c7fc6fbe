"""`python -m lumos_nb` is `lumos-nb`."""

from __future__ import annotations

import sys

from lumos_nb.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""Measurements of lumos_nb: `make accuracy` and `make bench` run them, `rows` keeps and quotes what they find."""

from pathlib import Path

SHARED = Path(__file__).parents[2] / "shared"
TRACES, MEASURED = SHARED / "traces", SHARED / "measured"
"""Files of others beside the checkout; what needs them is left out where they are absent."""

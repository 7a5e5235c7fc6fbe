"""Measurements of lumos_nb: `make accuracy` and `make bench` run them, `rows` keeps and quotes what they find."""

from pathlib import Path

SHARED = Path(__file__).parents[2] / "shared"
TRACES, MEASURED = SHARED / "traces", SHARED / "measured"
"""Files of others beside the checkout; what needs them is left out where they are absent."""


def published(name: str) -> Path:
    """A file of `MEASURED`; where it is not, the program ends and says what to do."""
    if not (file := MEASURED / name).exists():
        raise SystemExit(
            f"{file} is not there: put the folder of published figures beside the checkout, as shared/measured."
        )
    return file

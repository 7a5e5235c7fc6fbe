"""Measurements of lumos_nb: `make accuracy` and `make bench` run them, `rows` keeps and quotes what they find."""

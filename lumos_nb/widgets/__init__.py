"""Panels for a notebook: controls that call the functions of this package, and what these return. No arithmetic here.

Every panel has `controls` by name, `result` (what the functions returned last) and `code`, the lines that make it again
without a panel. What cannot be, says so where results stand, and the panel goes on. JupyterLab and Voila draw charts by
themselves, without a network.

This is the only package that imports ipywidgets.
"""

from lumos_nb.widgets.calibrations import inspect as inspect
from lumos_nb.widgets.explorer import explore as explore
from lumos_nb.widgets.panel import Panel as Panel
from lumos_nb.widgets.planners import choose_layout as choose_layout
from lumos_nb.widgets.planners import place_tables as place_tables
from lumos_nb.widgets.scenarios import configure as configure
from lumos_nb.widgets.scenarios import what_if as what_if

"""Charts: a frame, a graph or a result in, a chart out, which is returned and never shown.

Only this package imports altair. Importing it in a notebook makes charts appear there: JupyterLab draws them itself,
without a network, and what cannot run scripts (GitHub, nbviewer) shows the PNG beside it. A PNG takes 0.1 to 1.5 s a
chart; the environment variable `LUMOS_NB_STATIC=0` leaves it out. Charts drawn in JupyterLab's dark theme are dark;
`LUMOS_NB_THEME=dark` makes all of them so, images too.
"""

from lumos_nb.charts.changes import difference as difference
from lumos_nb.charts.changes import sensitivity as sensitivity
from lumos_nb.charts.changes import similarity_bars as similarity_bars
from lumos_nb.charts.changes import slack_bars as slack_bars
from lumos_nb.charts.changes import waterfall as waterfall
from lumos_nb.charts.costs import error_spread as error_spread
from lumos_nb.charts.costs import heat_map as heat_map
from lumos_nb.charts.costs import interval_check as interval_check
from lumos_nb.charts.costs import learning_curve as learning_curve
from lumos_nb.charts.costs import roofline as roofline
from lumos_nb.charts.costs import sweeps as sweeps
from lumos_nb.charts.dependencies import dependencies as dependencies
from lumos_nb.charts.estimates import agreement as agreement
from lumos_nb.charts.estimates import layouts as layouts
from lumos_nb.charts.estimates import pareto as pareto
from lumos_nb.charts.estimates import step_times as step_times
from lumos_nb.charts.pipelines import memory_bars as memory_bars
from lumos_nb.charts.pipelines import memory_over_time as memory_over_time
from lumos_nb.charts.pipelines import schedule as schedule
from lumos_nb.charts.rendering import CHART as CHART
from lumos_nb.charts.rendering import JUPYTERLAB_MIME as JUPYTERLAB_MIME
from lumos_nb.charts.rendering import mime_bundle as mime_bundle
from lumos_nb.charts.rendering import to_png as to_png
from lumos_nb.charts.rendering import to_svg as to_svg
from lumos_nb.charts.sharding import device_loads as device_loads
from lumos_nb.charts.sharding import sharding_plan as sharding_plan
from lumos_nb.charts.steps import breakdown_bars as breakdown_bars
from lumos_nb.charts.steps import predicted_vs_measured as predicted_vs_measured
from lumos_nb.charts.steps import structure_bars as structure_bars
from lumos_nb.charts.steps import timeline as timeline

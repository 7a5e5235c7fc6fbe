"""The documentation site: `make notebooks` executes and renders notebooks, `make docs` builds all into build/site.

The site has the pages of docs, the rendered notebooks, the gallery of charts and an API reference. Nothing in it is
fetched from anywhere.
"""

from __future__ import annotations

import argparse
import html
import importlib
import logging
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.commands.build import build as build_pages
from mkdocs.config import load_config
from mkdocs.utils import get_theme_dir
from nbconvert import HTMLExporter
from nbconvert.preprocessors import ExecutePreprocessor
from pygments.formatters import HtmlFormatter

import lumos_nb as ln
from benchmarks import gallery

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build"
RENDERED = BUILD / "notebooks"
PAGES = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs"),
    *(f"{folder}/README.md" for folder in ("notebooks", "datasets", "benchmarks")),
)
"""What is on the site as it stands in the repository; links between them hold there too."""
WIDGET = "application/vnd.jupyter.widget-view+json"
OFFLINE = """{% extends 'lab/index.html.j2' %}
{% block html_head_js %}{% endblock %}{% block jupyter_widgets %}{% endblock %}
{% block html_head_js_mathjax %}{% endblock %}{% block html_head_js_mermaidjs %}{% endblock %}
{% block body_header %}{{ super() }}
<p style="margin: 1em 4.5em"><a href="index.html">All notebooks</a></p>{% endblock %}
{% block data_png scoped %}<div class="jp-RenderedImage jp-OutputArea-output">
{% set width = output | get_metadata('width', 'image/png') %}
<img src="data:image/png;base64,{{ output.data['image/png'] | escape_html }}"
alt="{{ (output | get_metadata('alt', 'image/png') or 'A picture') | escape_html }}"
{% if width %}width="{{ width }}"{% endif %}>
</div>{% endblock %}"""
"""JupyterLab's page without what it would fetch, with a way back, and with what pictures say of themselves."""
LINKED = re.compile(r'(?<=href=")((?:\.\./)*[\w/]+)\.(?:ipynb|md)(?=["#])')
"""A link of a notebook to another one, or to a document."""
REFERENCE = {
    "Runs and graphs": (
        "traces.run",
        "ops",
        "graph",
        "steady",
        "symmetry",
        "traces.perfetto",
        "traces.execution_trace",
    ),
    "Answers": (
        "critical_path",
        "partition",
        "rankwise",
        "jobs",
        "findings",
        "beside",
        "evaluate",
        "resampling",
        "ledger",
        "report",
    ),
    "What if": ("whatif", "engine", "stragglers"),
    "Recording": ("recorder", "labels", "fake_group"),
    "Costs": ("config", "costs.calibration", "costs.fitting", "costs.samples", "costs.host", "executors"),
    "Language models": (
        *("transformer", "layout", "workloads.llm.estimates", "workloads.llm.screening", "workloads.surcharges"),
        *("workloads.llm.structure", "workloads.llm.rewriting", "workloads.llm.table_rows"),
    ),
    "Recommendation models": (
        *("embedding_tables", "costs.lookups", "costs.embeddings", "costs.embedding_net", "workloads.dlrm.model"),
        *("workloads.dlrm.estimates", "workloads.dlrm.plan", "workloads.dlrm.sharding"),
        *("workloads.dlrm.sharding_costs", "workloads.dlrm.pretraining", "workloads.dlrm.rescaling"),
        "workloads.dlrm.table_rows",
    ),
    "Exchange": ("exchange.chakra", "exchange.benchmark"),
    "Charts, panels, tables and data": ("charts", "widgets", "display", "datasets"),
}
"""Pages of the API reference, and the modules whose public names each has."""


def render(notebook: Path, out: Path, *, execute: bool = True) -> Path:
    """Write a notebook as an HTML page that needs no network, executed first; panels become a line of text."""
    read = nbformat.read(notebook, 4)
    if execute:
        ExecutePreprocessor(timeout=None, kernel_name="python3").preprocess(
            read, {"metadata": {"path": notebook.parent}}
        )
    for output in (output for cell in read.cells for output in cell.get("outputs", ())):
        if output.get("data", {}).pop(WIDGET, None):
            output["data"] = {"text/plain": "A panel: run the notebook to use it."}
    page, _ = HTMLExporter(raw_template=OFFLINE, mathjax_url="").from_notebook_node(
        read, {"metadata": {"name": notebook.stem}}
    )
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"{notebook.stem}.html"
    target.write_text(LINKED.sub(r"\1.html", page).replace("/README.html", "/index.html"))
    return target


def public_names() -> dict[str, list[str]]:
    """Modules of the reference -> what is public in them: what `lumos_nb` names, else all that they have or name."""
    named: dict[str, list[str]] = {}
    for name, module in ln._MODULE_OF.items():
        named.setdefault(module.removeprefix("lumos_nb."), []).append(name)
    for module in (module for modules in REFERENCE.values() for module in modules if module not in named):
        loaded = importlib.import_module(f"lumos_nb.{module}")
        own = {name for name, one in vars(loaded).items() if getattr(one, "__module__", "").startswith(loaded.__name__)}
        named[module] = sorted(getattr(loaded, "__all__", None) or {name for name in own if name[0] != "_"})
    return named


def reference(modules: Iterable[str]) -> str:
    """A page of the API reference: of each module what it is about, then its public names."""
    public = public_names()
    parts = []
    for module in modules:
        parts.append(f"::: lumos_nb.{module}\n    options: {{show_root_heading: true, members: false}}")
        parts += [
            f"::: lumos_nb.{module}.{name}\n    options: {{show_root_heading: true, heading_level: 3}}"
            for name in public[module]
        ]
    return "\n\n".join(parts) + "\n"


def gallery_page() -> str:
    """The gallery as a page: each question, the call that answers it, and the chart."""
    parts = [
        "# Gallery",
        "Drawn from bundled data; live [in light](gallery/light.html) and [in dark](gallery/dark.html).",
    ]
    for name, entry in gallery.GALLERY.items():
        said = f"{name.replace('_', ' ').capitalize()}: a chart that answers the question above, {entry.question}"
        pictures = [f"![{said}](gallery/{theme}/{name}.png){{.in-{theme}}}" for theme in ("light", "dark")]
        parts += [f"## {entry.question}", f"```python\n{entry.call}\n```", "\n".join(pictures)]
    return "\n\n".join(parts) + "\n"


def sources(out: Path, notebooks: Path, drawn: Path) -> dict[str, Any]:
    """Copy and make all pages of the site; returns what the navigation shows."""
    shutil.rmtree(out, ignore_errors=True)
    for page in PAGES:
        copy = shutil.copytree if (ROOT / page).is_dir() else shutil.copy
        (out / page).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / page, out / page)
    index = out / "notebooks" / "README.md"
    index.write_text(index.read_text().replace(".ipynb)", ".html)"))
    for page in notebooks.glob("*.html"):
        shutil.copy(page, out / "notebooks")
    shutil.copytree(drawn, out / "gallery")
    (out / "gallery.md").write_text(gallery_page())
    styles = {".highlight": "default", "[data-bs-theme=dark] .highlight": "github-dark"}
    (out / "style.css").write_text(
        "\n".join(HtmlFormatter(style=style).get_style_defs(where) for where, style in styles.items()) + STYLE
    )
    (out / "js").mkdir()
    (out / "js" / "darkmode.js").write_text(
        NO_HIGHLIGHTER + Path(get_theme_dir("mkdocs"), "js", "darkmode.js").read_text()
    )
    nav: list[Any] = [{"Start": "README.md"}, {"Notebooks": "notebooks/README.md"}, {"Gallery": "gallery.md"}]
    nav.append({"Guide": [{title_of(page): f"docs/{page.name}"} for page in in_order(out / "docs")]})
    (out / "api").mkdir()
    pages = {title: f"api/{re.sub(r'[^a-z]+', '_', title.lower())}.md" for title in REFERENCE}
    for title, page in pages.items():
        (out / page).write_text(f"# {title}\n\n{reference(REFERENCE[title])}")
    nav.append({"Reference": [{title: page} for title, page in pages.items()]})
    rest = {"Data": "datasets/README.md", "Beside other programs": "benchmarks/README.md"}
    rest |= {"Contributing": "CONTRIBUTING.md", "Changes": "CHANGELOG.md"}
    return {"nav": [*nav, {"More": [{title: page} for title, page in rest.items()]}]}


STYLE = """
.doc-contents { margin-left: 1em }
table { display: block; overflow-x: auto }
td:nth-child(2) { white-space: nowrap }
img { max-width: 100% }
.container { max-width: min(96vw, 1500px) }
[data-bs-theme=dark] .in-light, [data-bs-theme=light] .in-dark { display: none }
"""
NO_HIGHLIGHTER = """for (const id of ["hljs-light", "hljs-dark"]) {
    document.head.append(Object.assign(document.createElement("link"), {id}));
}
"""
"""The theme's script turns its highlighter's styles on and off, and fails where there are none."""


GUIDE = (
    *("replay", "formats", "tables", "waits", "costs", "llm", "recommendation", "chakra", "benchmarks_from_traces"),
    *("machines", "speed", "accuracy"),
)
"""Documents in the order in which they are read; others follow."""


def in_order(docs: Path) -> list[Path]:
    """The documents of a folder, as `GUIDE` has them, then by name."""
    named = {page.stem: page for page in sorted(docs.glob("*.md"))}
    return [named.pop(stem) for stem in GUIDE if stem in named] + [*named.values()]


def title_of(page: Path) -> str:
    """The first heading of a page."""
    return html.unescape(page.read_text().partition("\n")[0].removeprefix("# "))


def build(notebooks: Path = RENDERED, drawn: Path = gallery.OUT, out: Path = BUILD / "site") -> None:
    """Build the site of what was rendered and drawn; a warning is an error."""
    pages = out.with_name(f"{out.name}-pages")
    nav = sources(pages, notebooks, drawn)
    config = load_config(str(ROOT / "mkdocs.yml"), strict=True, docs_dir=str(pages), site_dir=str(out), **nav)
    config.plugins.on_startup(command="build", dirty=False)
    build_pages(config)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)  # mkdocs says what it warns of
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebooks", nargs="*", type=Path, help="notebooks to render; without any the site is built")
    arguments = parser.parse_args()
    for path in arguments.notebooks:
        print(render(path, RENDERED))
    if not arguments.notebooks:
        build()

"""The documentation site: built strictly, complete, and without anything that a network would have to bring."""

from __future__ import annotations

import html
import re
from pathlib import Path

import nbformat
import pytest

import lumos_nb as ln
from benchmarks import gallery
from benchmarks.site import REFERENCE, ROOT, WIDGET, build, public_names, render

FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|link(?![^>]*rel="(?:canonical|prev|next))[^>]*?)[^>]*?(?:src|href)=["'](?:https?:)?//[^"']+"""
    r"""|@import\s+["'(]*https?:[^;]+|url\(["']?(?:https?:)?//[^)]+"""
)
"""What a page would ask another host for; links that a reader may follow are none."""


def cell(kind: str, **more: object) -> nbformat.NotebookNode:
    made = {"cell_type": kind, "metadata": {}, "id": kind, **more}
    return nbformat.from_dict({"execution_count": None, "outputs": [], **made} if kind == "code" else made)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site with two charts and with notebooks rendered unexecuted."""
    folder = tmp_path_factory.mktemp("site")
    gallery.main(folder / "gallery", ["breakdown", "learning_curve"])
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        render(notebook, folder / "notebooks", execute=False)
    for theme in ("light", "dark"):  # the page shows all charts
        for name in gallery.GALLERY:
            (folder / "gallery" / theme / f"{name}.png").touch()
    build(folder / "notebooks", folder / "gallery", folder / "site")
    return folder / "site"


def test_it_asks_no_other_host_for_anything(site):
    pages = [path for path in site.rglob("*") if path.suffix in (".html", ".css")]
    assert len(pages) > 40
    found = {path.name: FETCHED.findall(path.read_text()) for path in pages}
    assert {name: urls for name, urls in found.items() if urls} == {}


def test_links_of_notebooks_lead_to_pages_of_the_site(site):
    for page in (site / "notebooks").glob("*.html"):
        linked = re.findall(r'href="([\w./]+)[#"]', page.read_text())
        assert "index.html" in linked or "../index.html" in linked
        assert [link for link in linked if not (page.parent / link).exists()] == [], page.name


def test_every_picture_of_the_gallery_says_what_it_is_and_has_a_dark_one(site):
    pictures = re.findall(r'<img alt="([^"]+)" class="in-(\w+)" src="([^"]+)"', (site / "gallery.html").read_text())
    assert len(pictures) == 2 * len(gallery.GALLERY)
    assert all((site / file).exists() and f"/{theme}/" in file for _, theme, file in pictures)
    assert min(len(said) for said, *_ in pictures) > 40


@pytest.mark.parametrize(
    ("text", "fetched"),
    [
        ('<script src="https://cdn.example/x.js">', True),
        ('<link rel="stylesheet" href="//fonts.example/css">', True),
        ("@import url(https://fonts.example/css);", True),
        ('<a href="https://ui.perfetto.dev">', False),
        ('<script src="js/base.js">', False),
    ],
)
def test_what_counts_as_asking_another_host(text, fetched):
    assert bool(FETCHED.search(text)) is fetched


def test_it_has_every_document_and_notebook(site):
    for folder, pattern in (("docs", "*.md"), ("notebooks", "*.ipynb")):
        for path in (ROOT / folder).glob(pattern):
            assert (site / folder / f"{path.stem}.html").exists() or path.stem == "README", path.name


def test_the_reference_has_every_public_name(site):
    public = {module.removeprefix("lumos_nb.") for module in {*ln._MODULE_OF.values(), *ln._PUBLIC_MODULES.values()}}
    assert public <= {module for modules in REFERENCE.values() for module in modules}
    text = "".join(path.read_text() for path in (site / "api").glob("*.html"))
    for module, names in public_names().items():
        for name in names:
            assert f'id="lumos_nb.{module}.{name}"' in text, f"{module}.{name}"


def test_a_picture_says_in_the_page_what_it_shows(tmp_path):
    seen = {"image/png": {"width": 40, "alt": 'Time of "a" < b'}}
    shown = {"output_type": "display_data", "metadata": seen, "data": {"image/png": "iVBORw0KGgo="}}
    book = nbformat.v4.new_notebook(cells=[cell("code", source="", outputs=[shown])])
    nbformat.write(book, tmp_path / "one.ipynb")
    page = render(tmp_path / "one.ipynb", tmp_path / "out", execute=False).read_text()
    (picture,) = re.findall(r"<img[^>]*>", page, re.DOTALL)
    assert 'width="40"' in picture
    assert html.unescape(picture).count('Time of "a" < b') == 1


def test_a_notebook_is_executed_and_its_panels_become_a_line(tmp_path):
    shown = {"output_type": "display_data", "metadata": {}, "data": {WIDGET: {"model_id": "x"}, "text/plain": "VBox()"}}
    book = nbformat.v4.new_notebook(cells=[cell("markdown", source="# Why?"), cell("code", source="", outputs=[shown])])
    nbformat.write(book, tmp_path / "one.ipynb")
    page = render(tmp_path / "one.ipynb", tmp_path / "out", execute=False).read_text()
    assert "A panel: run the notebook to use it." in page
    assert "model_id" not in page
    book.cells = [cell("code", source="print(6 * 7)")]
    nbformat.write(book, tmp_path / "two.ipynb")
    page = render(tmp_path / "two.ipynb", tmp_path / "out").read_text()
    assert re.search(r"<pre>42\n</pre>", page)
    assert FETCHED.findall(page) == []

"""JupyterLab and Voila on this machine, and a browser that can reach nothing else."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Locator, Page, Route, TimeoutError, sync_playwright

ROOT = Path(__file__).parents[1]
SETTINGS = {
    "apputils-extension/notification": '{"fetchNews": "false", "checkForUpdates": false}',
    "notebook-extension/tracker": '{"windowingMode": "none"}',  # cells out of sight are drawn too
}
CHART = ".vega-embed .marks"
PATIENCE_S = 120
ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def chromium() -> str | None:
    """The browser of this machine, if it has one."""
    return next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)


@contextmanager
def serving(*command: str) -> Iterator[str]:
    """The address of a server that knows no settings but these, of a Jupyter command that takes `{port}` and `{token}`.

    It runs in a folder of its own, with copies of the notebooks.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        for name, text in SETTINGS.items():
            file = home / "config/lab/user-settings/@jupyterlab" / f"{name}.jupyterlab-settings"
            file.parent.mkdir(parents=True)
            file.write_text(text)
        shutil.copytree(ROOT / "notebooks", home / "notebooks")
        places = {f"JUPYTER_{name.upper()}_DIR": str(home / name) for name in ("config", "data", "runtime")}
        places |= {"IPYTHONDIR": str(home / "ipython"), "JUPYTER_PATH": str(home / "notebooks/app")}
        places |= {"LUMOS_NB_STATIC": "0"}
        filled = [part.format(port=port, token=token) for part in command]
        with (home / "log").open("w") as log:
            server = subprocess.Popen(
                [sys.executable, "-m", *filled], cwd=home, env=os.environ | places, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_for(f"{address}/static/favicon.ico", server, home / "log")
            yield f"{address}/{{}}?token={token}"
        finally:
            server.terminate()
            server.wait(timeout=30)


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(PATIENCE_S * 4):
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except urllib.error.HTTPError:
            return
        except OSError:
            if server.poll() is not None:
                break
            time.sleep(0.25)
        else:
            return
    raise AssertionError(f"the server did not start:\n{log.read_text()}")


def lab() -> list[str]:
    """JupyterLab's command."""
    return [
        *("jupyterlab", "--allow-root", "--no-browser", "--ServerApp.ip=127.0.0.1", "--ServerApp.port={port}"),
        *("--ServerApp.port_retries=0", "--IdentityProvider.token={token}", "--LabApp.expose_app_in_browser=True"),
    ]


def voila(notebook: str) -> list[str]:
    """Voila's command, as `make app` has it."""
    return [
        *("voila", notebook, "--template=offline", "--no-browser", "--Voila.ip=127.0.0.1", "--port={port}"),
        *("--Voila.port_retries=0", "--Voila.token={token}", "--show_tracebacks=True"),
    ]


@contextmanager
def browser() -> Iterator[Browser]:
    """The installed Chromium, without a window."""
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium(), args=list(ARGUMENTS))
        yield running
        running.close()


def page_of(running: Browser, outside: list[str]) -> Page:
    """A page that reaches this machine alone; what else it asks for is added to `outside`."""
    page = running.new_page(viewport={"width": 1400, "height": 1300})
    page.set_default_timeout(1000 * PATIENCE_S)

    def route(asked: Route) -> None:
        if urlsplit(asked.request.url).hostname == "127.0.0.1":
            asked.continue_()
        else:
            outside.append(asked.request.url)
            asked.abort()

    page.route("**/*", route)
    return page


def run_all(page: Page, address: str, notebook: str) -> None:
    """Open a notebook in JupyterLab and run it; returns before it is through."""
    idle = "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
    for tries_left in (2, 1, 0):
        page.goto(address.format(f"doc/tree/{notebook}"))
        try:
            page.wait_for_function(idle, timeout=1000 * PATIENCE_S / 3)
            break
        except TimeoutError:  # on a busy machine a page may miss the first word of its kernel: it is opened again
            if not tries_left:
                raise
    run_cells(page)


def run_cells(page: Page) -> None:
    """Run all cells of the notebook that a page shows, once more perhaps; returns before it is through."""
    page.evaluate("() => { window.ran = window.jupyterapp.commands.execute('notebook:run-all-cells').then(() => 1) }")


def errors(page: Page) -> list[str]:
    """What went wrong in an opened notebook once all its cells have run."""
    page.evaluate("() => window.ran")
    cells = page.evaluate("() => window.jupyterapp.shell.currentWidget.content.model.sharedModel.toJSON().cells")
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    return [f"{one['ename']}: {one['evalue']}" for one in outputs if one["output_type"] == "error"]


def panel_with(page: Page, control: str) -> Locator:
    """The panel that has a control of this name, in sight and with its charts drawn."""
    label = page.locator(".widget-label", has_text=re.compile(f"^{re.escape(control)}$"))
    panel = page.locator(".lumos-panel").filter(has=label).first
    panel.locator(CHART).first.wait_for()
    panel.scroll_into_view_if_needed()
    return panel


def slide(panel: Locator, control: str, key: str, times: int) -> None:
    """Move a panel's slider by a key of the keyboard."""
    row = panel.locator(".widget-slider").filter(has_text=re.compile(f"^{re.escape(control)}"))
    for _ in range(times):
        row.locator(".noUi-handle").press(key)

"""A real JupyterLab in a real chromium: starts both, opens a notebook, runs it, and takes pictures of it."""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NOTIFICATIONS = {"fetchNews": "false", "checkForUpdates": False}
CHROMIUM = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")


@dataclass(frozen=True)
class Server:
    """A running JupyterLab: where it listens, and the words that open it."""

    url: str
    token: str


@contextmanager
def jupyter_lab(folders: Sequence[Path], home: Path, **env: str) -> Iterator[Server]:
    """JupyterLab on copies of the notebooks in some folders; all that it writes goes under `home`."""
    root = home / "notebooks"
    root.mkdir(parents=True)
    for path in (path for folder in folders for path in folder.glob("*.ipynb")):
        shutil.copy(path, root)
    settings = home / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(NOTIFICATIONS))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Server(f"http://127.0.0.1:{port}", secrets.token_hex(8))
    own = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    places = {
        "JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces", "IPYTHONDIR": "ipython",
    }  # fmt: skip
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}",
        "--ServerApp.port_retries=0", f"--ServerApp.root_dir={root}", f"--IdentityProvider.token={server.token}",
        "--LabApp.news_url=None",
    ]  # fmt: skip
    with (home / "server.log").open("w") as log:
        variables = own | {name: str(home / folder) for name, folder in places.items()} | env
        process = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
        try:
            _wait_for(server, process, home / "server.log")
            yield server
        finally:
            process.terminate()
            process.wait(20)


def _wait_for(server: Server, process: subprocess.Popen, log: Path, limit_s: float = 40) -> None:
    end = time.monotonic() + limit_s
    while True:
        try:
            urllib.request.urlopen(f"{server.url}/api/status?token={server.token}", timeout=5).close()
            return
        except OSError:
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-2000:]
            time.sleep(0.2)


@contextmanager
def chromium() -> Iterator[Any]:
    """Debian's browser, without a screen."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    assert path, "chromium is not installed"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(CHROMIUM))
        yield browser
        browser.close()


@dataclass
class LabPage:
    """A notebook that is open in JupyterLab. `said`: the console's errors and the page's own."""

    page: Any
    said: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, browser: Any, server: Server, notebook: Path, *, dark: bool = False) -> "LabPage":
        """Open a notebook, its kernel idle and all its cells there."""
        view = browser.new_page(viewport={"width": 1280, "height": 1000})
        opened = cls(view)
        view.on("console", lambda message: opened.said.append(message.text) if message.type == "error" else None)
        view.on("pageerror", lambda error: opened.said.append(f"page error: {error}"))
        cells = len(json.loads(notebook.read_text())["cells"])
        view.goto(f"{server.url}/lab/tree/{notebook.name}?token={server.token}&reset")
        view.wait_for_function(
            """cells => /\\| Idle/.test(document.querySelector('#jp-main-statusbar')?.innerText ?? '')
            && document.querySelectorAll('.jp-Notebook .jp-Cell').length === cells""",
            arg=cells,
            timeout=60_000,
        )
        opened.menu("Settings", "Theme", f"JupyterLab {'Dark' if dark else 'Light'}")
        light = "false" if dark else "true"
        view.wait_for_selector(f'body[data-jp-theme-light="{light}"]', state="attached")
        view.keyboard.press("Control+b")  # the file browser goes, the notebook gets its room
        return opened

    def menu(self, *names: str) -> None:
        """Choose from the menu bar."""
        self.page.locator(".lm-MenuBar-item", has_text=names[0]).first.click()
        for name in names[1:]:
            self.page.locator(".lm-Menu-item", has_text=name).filter(visible=True).first.click()

    def run_all(self, sentinel: str, limit_s: float = 90) -> None:
        """Run all cells; back when the last one has printed the sentinel."""
        self.menu("Run", "Run All Cells")
        self.page.wait_for_function(
            """words => [...document.querySelectorAll('.jp-OutputArea-output')]
            .some(one => one.innerText.includes(words) || one.innerText.includes('Traceback'))""",
            arg=sentinel,
            timeout=limit_s * 1000,
        )
        failed = self.page.locator('.jp-OutputArea-output[data-mime-type="application/vnd.jupyter.stderr"]')
        assert failed.count() == 0, failed.first.inner_text()

    def shots(self, folder: Path, name: str) -> list[Path]:
        """Pictures of the whole notebook, a window's height each."""
        folder.mkdir(parents=True, exist_ok=True)
        outer = self.page.locator(".jp-WindowedPanel-outer").first
        found, top = [], 0
        while True:
            outer.evaluate("(box, top) => box.scrollTop = top", top)
            self.page.wait_for_timeout(400)
            found.append(folder / f"{name}-{len(found) + 1}.png")
            self.page.screenshot(path=found[-1])
            height, room = outer.evaluate("box => [box.clientHeight, box.scrollHeight]")
            top += height - 40
            ended = self.page.locator(".jp-Notebook .jp-Cell").last.evaluate(
                "cell => cell.getBoundingClientRect().bottom < innerHeight"
            )
            if ended or top + 40 >= room or len(found) == 12:
                return found

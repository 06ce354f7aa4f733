"""Runs a notebook as strictly as a reader would look: what other runners let pass, fails here.

nbclient alone passes a notebook with an exception in an observer, a button callback or a thread. This one listens to
everything that the kernel says, whoever asked for it, and afterwards asks the kernel what it has left behind.
"""

import ast
import asyncio
import json
import os
import re
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client import AsyncKernelClient
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError

WATCH = """
import sys, threading, types
seen = sys.modules["notebook_watch"] = types.ModuleType("notebook_watch")
seen.raised, said = [], threading.excepthook
def hook(args):
    seen.raised.append(f"{args.exc_type.__name__}: {args.exc_value}")
    said(args)
threading.excepthook = hook
seen.figures = lambda: len(plt.get_fignums()) if (plt := sys.modules.get("matplotlib.pyplot")) else 0
"""
LEFT = "(sys.raised, sys.figures())".replace("sys", "__import__('notebook_watch')")


@dataclass
class Page:
    """A running notebook as its front end sees it: the widgets' states, and ways to move them."""

    client: Any
    subshell: str | None
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def find(self, **wanted: Any) -> str:
        """The id of the one widget whose state has these values; `css` is one of its own classes."""
        css = wanted.pop("css", None)
        found = [
            name
            for name, state in self.states.items()
            if all(state.get(key) == value for key, value in wanted.items())
            and (css is None or css in state.get("_dom_classes", ()))
        ]
        assert len(found) == 1, f"{len(found)} widgets have {wanted} and class {css}, not one"
        return found[0]

    def set(self, widget: str, **state: Any) -> None:
        """Change a widget's values as a front end does."""
        self._send(widget, {"method": "update", "state": state, "buffer_paths": []})

    def click(self, button: str) -> None:
        """Press a button."""
        self._send(button, {"method": "custom", "content": {"event": "click"}})

    async def until(self, holds: Callable[[], Any], limit_s: float = 10) -> None:
        """Wait until something holds of the states."""
        end = time.monotonic() + limit_s
        while not holds():
            assert time.monotonic() < end, f"not so after {limit_s} s"
            await asyncio.sleep(0.02)

    def _send(self, widget: str, data: dict[str, Any]) -> None:
        message = self.client.session.msg("comm_msg", {"comm_id": widget, "data": data})
        if self.subshell:
            message["header"]["subshell_id"] = self.subshell
        self.client.shell_channel.send(message)

    async def listen(self) -> None:
        """Hear every message of the kernel, whoever asked for it."""
        while True:
            message = await self.client.iopub_channel.get_msg()
            kind, content = message["msg_type"], message["content"]
            if kind == "error":
                self.problems.append(f"error: {content['ename']}: {content['evalue']}")
            elif kind == "stream" and content["name"] == "stderr":
                self.problems.append(f"stderr: {content['text'].strip()[-500:]}")
            elif kind in ("comm_open", "comm_msg") and isinstance(new := content["data"].get("state"), dict):
                self.states.setdefault(content["comm_id"], {}).update(new)
                if any(output.get("output_type") == "error" for output in new.get("outputs") or ()):
                    self.problems.append("error in an Output widget")


Act = Callable[[Page], Awaitable[None]]


def check(
    path: Path, *, limit_s: float = 60, acts: Sequence[Act] = (), subshell: bool = False, **env: str
) -> list[str]:
    """What is wrong with a notebook, run in its own folder: an empty list is a pass.

    limit_s: the seconds that it may take, kernel start included. acts: what a reader then does to its widgets.
    subshell: their messages go to a subshell of the kernel, as JupyterLab sends them. env: added to the kernel's own.
    The last cell has to print the sentinel "<name of the file>: done".
    """
    return asyncio.run(_check(Path(path), limit_s, acts, subshell, env))


async def _check(path: Path, limit_s: float, acts: Sequence[Act], subshell: bool, env: dict[str, str]) -> list[str]:
    notebook = nbformat.read(path, 4)
    runner = NotebookClient(
        notebook, timeout=None, kernel_name="python3", resources={"metadata": {"path": path.parent}}
    )
    own = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    # agg keeps a pyplot figure open, which the inline backend would close at the end of the cell
    variables = own | {"MPLBACKEND": "agg", "PYDEVD_DISABLE_FILE_VALIDATION": "1"} | env
    page, left = Page(None, None), ([], 0)
    with tempfile.TemporaryFile("w+") as log:
        try:
            async with asyncio.timeout(limit_s) as limit, runner.async_setup_kernel(env=variables, stderr=log):
                assert runner.km is not None
                page.client = AsyncKernelClient()  # not runner.km.client(), which would take the runner's replies
                page.client.load_connection_info(runner.km.get_connection_info())
                page.client.start_channels()
                await page.client.wait_for_ready(timeout=limit_s)
                listening = asyncio.create_task(page.listen())
                await _ask(page.client, f"exec({WATCH!r}, {{}})")
                page.subshell = await _subshell(page.client) if subshell else None
                try:
                    for index, cell in enumerate(notebook.cells):
                        await runner.async_execute_cell(cell, index)
                    for act in acts:
                        await act(page)
                    left = await _ask(page.client, "", LEFT)
                    await asyncio.sleep(0.2)  # for what is still on its way
                finally:
                    listening.cancel()
                    page.client.stop_channels()
        except (CellExecutionError, DeadKernelError, AssertionError, TimeoutError) as error:
            if limit.expired():  # what a kernel says that is stopped in the middle is nothing new
                return [f"over its time of {limit_s} s"]
            page.problems.append(f"{type(error).__name__}: {str(error)[-800:]}")
        log.seek(0)
        page.problems += [f"kernel log: {text[-800:]}" for text in [log.read()] if "Traceback" in text]
    page.problems += [f"exception in a thread: {raised}" for raised in left[0]]
    page.problems += [f"open pyplot figures: {left[1]}"] if left[1] else []
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    printed = "".join(out.get("text", "") for out in (code[-1].outputs if code else ()))
    if f"{path.stem}: done" not in printed:
        page.problems.append(f"the last cell has not printed {path.stem + ': done'!r}")
    page.problems += [f"error output: {o.ename}" for c in code for o in c.outputs if o.output_type == "error"]
    return [re.sub(r"\x1b\[[0-9;]*m", "", problem) for problem in dict.fromkeys(page.problems)]


async def _ask(client: Any, code: str, expression: str = "None") -> Any:
    """Run code outside the notebook's cells; the value of an expression of literals."""
    asked = client.execute(code, store_history=False, silent=True, user_expressions={"value": expression})
    reply = await _reply(client.get_shell_msg, asked)
    assert reply["status"] == "ok", json.dumps(reply)[-500:]
    return ast.literal_eval(reply["user_expressions"]["value"]["data"]["text/plain"])


async def _subshell(client: Any) -> str:
    message = client.session.msg("create_subshell_request", {})
    client.control_channel.send(message)
    return (await _reply(client.get_control_msg, message["header"]["msg_id"]))["subshell_id"]


async def _reply(get: Callable[[], Awaitable[dict[str, Any]]], asked: str) -> dict[str, Any]:
    while (reply := await get())["parent_header"].get("msg_id") != asked:
        pass
    return reply["content"]

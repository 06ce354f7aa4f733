"""One thread per lab that does what explorers ask for: of each the latest request, the older ones are cancelled."""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

from labkit.backbone import LOOK_UP

IDLE_SECONDS = 5.0
"""How long a thread without work stays."""


class Job:
    """One request: `work(job)` is called in the worker; between steps, and whenever the model runs, it looks up."""

    def __init__(self, owner: Any, work: Callable[["Job"], None]):
        self.owner, self.work = owner, work
        self.cancelled, self.done = threading.Event(), threading.Event()
        self.error: BaseException | None = None

    def check(self) -> None:
        """Raise CancelledError if nobody waits for this any more."""
        if self.cancelled.is_set():
            raise CancelledError

    def run(self) -> None:
        """The work; an error is kept for who waits."""
        looks = LOOK_UP.set(self.check)
        try:
            self.check()
            self.work(self)
        except CancelledError:
            self.cancelled.set()
        except BaseException as error:
            self.error = error
        finally:
            LOOK_UP.reset(looks)
            self.done.set()


class Worker:
    """A queue with one place for each owner, and the thread that empties it; the thread ends when there is no work."""

    def __init__(self):
        self.change = threading.Condition()
        self.waiting: dict[int, Job] = {}
        self.running: Job | None = None
        self.thread: threading.Thread | None = None

    def submit(self, owner: Any, work: Callable[[Job], None]) -> Job:
        """Queue work; what the same owner has queued or running is cancelled."""
        job = Job(owner, work)
        with self.change:
            self._drop(owner)
            self.waiting[id(owner)] = job
            if self.thread is None:
                self.thread = threading.Thread(target=self._loop, name="labkit-worker", daemon=True)
                self.thread.start()
            self.change.notify()
        return job

    def cancel(self, owner: Any) -> None:
        """Cancel what this owner has queued or running."""
        with self.change:
            self._drop(owner)

    def _drop(self, owner: Any) -> None:
        old = self.waiting.pop(id(owner), None)
        if old is not None:
            old.cancelled.set()
            old.done.set()
        if self.running is not None and self.running.owner is owner:
            self.running.cancelled.set()

    def _loop(self) -> None:
        while True:
            with self.change:
                self.running = None
                if not self.waiting and not self.change.wait_for(lambda: self.waiting, IDLE_SECONDS):
                    self.thread = None
                    return
                self.running = self.waiting.pop(next(iter(self.waiting)))
                job = self.running
            job.run()
            del job


_workers: "weakref.WeakKeyDictionary[Any, Worker]" = weakref.WeakKeyDictionary()
_making = threading.Lock()


def worker_of(lab: Any) -> Worker:
    """The lab's own worker."""
    with _making:
        return _workers.setdefault(lab, Worker())

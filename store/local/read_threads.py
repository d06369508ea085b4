"""`ReadThreads`: a fixed number of threads that do the jobs of a source, one after the other, until it is closed.

Threads are started with the first job. They are daemon threads: a program that ends without closing its source
does not hang.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

J = TypeVar("J")


class ReadThreads(Generic[J]):
    """Threads that ask `take` for a job under `lock`, and do it outside of it.

    `on_crash` is told, without the lock, of an exception that a job let out: a mistake of ours; the thread ends.
    """

    def __init__(
        self,
        count: int,
        lock: threading.Lock,
        take: Callable[[], J | None],
        do: Callable[[J], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._count = count
        self._jobs = threading.Condition(lock)
        self._take = take
        self._do = do
        self._on_crash = on_crash
        self._threads: list[threading.Thread] = []
        self._stopped = False

    def wake(self, jobs: int) -> None:
        """There are `jobs` more. Under the lock."""
        if not self._threads and not self._stopped:
            for number in range(self._count):
                thread = threading.Thread(target=self._serve, name=f"k3-store_{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        self._jobs.notify(min(jobs, self._count))

    def stop(self) -> None:
        """Take no more jobs; returns when those in progress are done. Not under the lock."""
        with self._jobs:
            self._stopped = True
            self._jobs.notify_all()
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        try:
            while True:
                with self._jobs:
                    while not self._stopped and (job := self._take()) is None:
                        self._jobs.wait()
                    if self._stopped:
                        return
                assert job is not None
                self._do(job)
                del job  # while it waits, a thread keeps nothing alive
        except BaseException as error:  # the bookkeeping went wrong: whoever waits must hear of it
            self._on_crash(error)

"""Makes the places of a model's missing bytes ready, ahead of those who fill them. Loads nothing.

Mapping a page takes a good part of the time in which it is filled, so it has a thread of its own, which
begins before the first chunk is even asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from hearth.core.errors import LoadCancelled
from hearth.models.layout import ByteRange
from hearth.system.standing_threads import StandingThreads

#: How much is made ready at a time: little at first, for somebody waits for it, then more and more.
FIRST_BYTES, MOST_BYTES = 16 << 20, 128 << 20


class PageMapping:
    """Memory that is being made ready. Any thread may wait for parts of it."""

    def __init__(
        self, prepare: Callable[[ByteRange], None], parts: Sequence[ByteRange], threads: StandingThreads
    ) -> None:
        """`parts` in the order in which they are filled; `prepare` is called by one thread."""
        self._prepare, self._parts = prepare, parts
        self._end = parts[-1].end
        #: Up to where all parts are ready, or why they never will be; True once nobody needs them any more.
        self._done = parts[0].begin
        self._error: Exception | None = None
        self._is_stopped = False
        self._progress = threading.Condition()  #: guards these three
        self._errand = threads.start(self._run)

    def wait_for(self, part: ByteRange) -> None:
        """Return when all of the parts that lie in these bytes can be written.

        Raises:
            DeviceError: the device refuses it.
            LoadCancelled: the work was stopped.
        """
        wanted = min(part.end, self._end)
        with self._progress:
            while self._done < wanted and self._error is None:
                self._progress.wait()
            if self._done < wanted and self._error is not None:
                raise self._error

    def is_ready(self, part: ByteRange) -> bool:
        """True if `wait_for` would return at once."""
        return self._done >= min(part.end, self._end)

    @property
    def is_done(self) -> bool:
        return self._done >= self._end

    def wait(self) -> None:
        """Return when all parts can be written; raises as `wait_for`."""
        self.wait_for(ByteRange(0, self._end))

    def stop(self) -> None:
        """Leave the rest, and wait until nothing more is made ready."""
        with self._progress:
            self._is_stopped = True
        self._errand.join()

    def _run(self) -> None:
        num_bytes = FIRST_BYTES
        try:
            for part in self._parts:
                begin = part.begin
                while begin < part.end:
                    end = min(part.end, begin + num_bytes)
                    self._prepare(ByteRange(begin, end))
                    self._advance(end)
                    begin, num_bytes = end, min(2 * num_bytes, MOST_BYTES)
        except Exception as error:  # the thread's top: whoever waits is told
            with self._progress:
                self._error = error
                self._progress.notify_all()

    def _advance(self, end: int) -> None:
        with self._progress:
            self._done = end
            self._progress.notify_all()
            if self._is_stopped:
                raise LoadCancelled("the load was called off")

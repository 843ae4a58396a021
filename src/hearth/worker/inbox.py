"""The queue of the step thread, which sleeps on a pipe: waking a thread from a lock is slow.

A thread that is woken from a lock starts on an idle core, which in a virtual machine takes 0.2 ms to wake up.
One that is woken from a read starts on the core of the writer, which is about to sleep itself.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar
from weakref import finalize

#: The kernel counts milliseconds in 31 bits.
_LONGEST_S = 86400.0

Message = TypeVar("Message")


class Inbox(Generic[Message]):
    """Any thread puts; one thread gets."""

    def __init__(self) -> None:
        self._messages: SimpleQueue[Message] = SimpleQueue()
        self._is_asleep = False  #: the thread that gets; it wants a byte in the pipe
        self._bell, self._ring = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)
        finalize(self, _close, self._bell, self._ring)

    def empty(self) -> bool:
        return self._messages.empty()

    def put(self, message: Message) -> None:
        self._messages.put(message)
        if self._is_asleep:
            self._is_asleep = False
            with suppress(BlockingIOError):  # full of bytes that wake it, too
                os.write(self._ring, b"\0")

    def get(self, timeout: float | None = None) -> Message:
        """Return the oldest message. Raises queue.Empty if none comes within `timeout` seconds, or a day."""
        with suppress(Empty):
            return self._messages.get_nowait()
        timeout_ms = None if timeout is None else min(timeout, _LONGEST_S) * 1e3
        self._is_asleep = True
        try:
            while True:
                with suppress(Empty):  # before it sleeps: one may have come meanwhile
                    return self._messages.get_nowait()
                if not self._poll.poll(timeout_ms):
                    return self._messages.get_nowait()
                os.read(self._bell, 4096)
                self._is_asleep = True
        finally:
            self._is_asleep = False


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)

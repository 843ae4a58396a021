"""Ends a process together with the one that started it, whatever happens to either. Starts no process."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it is gone.

    The end of standard input says the same; this is for a process that no longer listens.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Ctrl-C reaches every process of a terminal, and a service manager tells all to end, but what that means
    # is for the parent to decide: it may have requests to finish.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))  # as which a template is started

"""Starts the process that workers are forked from. Imports next to nothing, so that it starts first."""

from __future__ import annotations

import os
import signal
import socket
import sys
from dataclasses import dataclass

#: -P: not what lies in the directory it was started in.
COMMAND = ("-P", "-m", "hearth.worker.template")


@dataclass(frozen=True, slots=True)
class TemplateProcess:
    pid: int
    socket: socket.socket  #: over which it is asked for workers, and with which it ends


def start_template(errors: int) -> TemplateProcess:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    try:
        with theirs:
            descriptors = enumerate((theirs.fileno(), errors, errors))
            pid = os.posix_spawn(
                sys.executable,
                (sys.executable, *COMMAND),
                os.environ,
                file_actions=[(os.POSIX_SPAWN_DUP2, opened, number) for number, opened in descriptors],
                setsigmask=(signal.SIGINT,),  # until it ignores Ctrl-C, which would be told by a traceback
            )
    except BaseException:
        ours.close()
        raise
    return TemplateProcess(pid, ours)

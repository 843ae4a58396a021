"""The process that owns the host segment and the disk of this machine, and leases chunks to its workers.

In a cluster it also receives chunks from other nodes, and sends them its own.

    python -m hearth.store.keeper     reads a `KeeperSetup` as a line on standard input; writes a
                                      `ProcessAnswer` to standard output; then answers each further line by
                                      a `KeeperPulse`

The process ends when its standard input closes. It never touches a device. Its main thread only answers, so
it answers at once however slow disk and object storage are.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec

from hearth.core.config import StoreConfig
from hearth.core.errors import HearthError
from hearth.core.messages import KeeperPulse, KeeperSetup, ProcessAnswer
from hearth.store.tiers.read_hashed import is_native
from hearth.store.tiers.tiers import Tiers
from hearth.store.transfer.lease_server import LeaseServer
from hearth.store.transfer.peer_server import PeerServer
from hearth.store.transfer.peers import Peers
from hearth.system.die_with_parent import die_with_parent
from hearth.system.garbage import collect_when_idle


class BooksProbe:
    """Tells for how long the locks of shared books could not be taken, without waiting for them.

    Its own thread takes the locks. One other thread asks.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._asked = threading.Event()
        #: When the look under way began; None: the last one is over.
        self._began_s: float | None = None
        threading.Thread(target=self._work, name="hearth-probe", daemon=True).start()

    def held_s(self) -> float:
        """Return how long the present look has waited; begin one if there is none. Returns at once."""
        began_s, now_s = self._began_s, time.monotonic()
        if began_s is not None:
            return now_s - began_s
        self._began_s = now_s
        self._asked.set()
        return 0.0

    def _work(self) -> None:
        while True:
            self._asked.wait()
            self._asked.clear()
            self._look()
            self._began_s = None


def main() -> int:
    die_with_parent()
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=KeeperSetup)
    logging.basicConfig(
        level=setup.log_level.upper(), format="%(asctime)s %(levelname)s keeper %(name)s %(message)s"
    )
    with ExitStack() as stack:
        try:
            config = StoreConfig(path=setup.path, disk_bytes=setup.disk_bytes, host_bytes=setup.host_bytes)
            keeps_chunks = setup.kind == "cuda"
            credentials = None if setup.credentials is None else Path(setup.credentials)
            peers = None if setup.agent_socket is None else Peers(Path(setup.agent_socket), credentials)
            tiers = stack.enter_context(
                closing(Tiers(config, is_pinned=False, keeps_chunks=keeps_chunks, peers=peers))
            )
            stack.enter_context(closing(LeaseServer(tiers, Path(setup.socket))))
            if setup.peers_socket is not None:
                stack.enter_context(closing(PeerServer(tiers, Path(setup.peers_socket), credentials)))
        except HearthError as error:
            _say(ProcessAnswer(error.label, str(error)))
            return 1
        _say(ProcessAnswer(reads_natively=is_native()))
        probe = BooksProbe(tiers.pass_books)
        stack.enter_context(collect_when_idle())  # its threads leave hardly any garbage
        for _ in sys.stdin.buffer:  # until the parent closes it
            _say(KeeperPulse(probe.held_s()))
    return 0


def _say(answer: ProcessAnswer | KeeperPulse) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())

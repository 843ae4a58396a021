"""The process that owns the host segment and the disk of this machine, and leases chunks to its workers.

In a cluster it also receives chunks from other nodes, and sends them its own.

    python -m hearth.store.keeper     reads a `KeeperSetup` as a line on standard input; writes a
                                      `ProcessAnswer` to standard output; then answers each further line by
                                      an empty one

The process ends when its standard input closes. It never touches a device. Its main thread only answers, so
it answers at once however slow disk and object storage are.
"""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec

from hearth.core.config import StoreConfig
from hearth.core.errors import HearthError
from hearth.core.messages import KeeperSetup, ProcessAnswer
from hearth.store.tiers.read_hashed import is_native
from hearth.store.tiers.tiers import Tiers
from hearth.store.transfer.lease_server import LeaseServer
from hearth.store.transfer.peer_server import PeerServer
from hearth.store.transfer.peers import Peers
from hearth.store.transfer.send_turns import SendLimit
from hearth.system.die_with_parent import die_with_parent
from hearth.system.garbage import collect_when_idle


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
                limit = None if setup.max_send_bytes is None else SendLimit(setup.max_send_bytes)
                server = PeerServer(tiers, Path(setup.peers_socket), credentials, limit)
                stack.enter_context(closing(server))
        except HearthError as error:
            _say(msgspec.json.encode(ProcessAnswer(error.label, str(error))))
            return 1
        _say(msgspec.json.encode(ProcessAnswer(reads_natively=is_native())))
        stack.enter_context(collect_when_idle())  # its threads leave hardly any garbage
        for _ in sys.stdin.buffer:  # until the parent closes it
            _say(b"")
    return 0


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())

"""Answers the keeper's questions about other nodes, over a Unix socket of this machine.

    {"sources": DIGEST}   {"sources": [{"node": "gpu-2", "host": HEXMASK, "disk": HEXMASK}, ...]}
    {"ticket": "gpu-2"}   {"host": "10.0.0.2", "port": 7610, "ticket": HEX, "is_encrypted": true}
    anything else         {"error": REASON}

A question is a line of JSON, and so is its answer. Bit i of a mask, the lowest of the first byte first, is
chunk i.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from hearth.core.errors import HearthError, ServiceError
from hearth.core.node_messages import Source, TicketGranted
from hearth.core.types import Digest, NodeId

MAX_QUESTION_BYTES = 4096


class ClusterGuide(Protocol):
    """Knows where chunks are and how to get there. Raises HearthError."""

    async def sources(self, model: Digest) -> Sequence[Source]: ...

    async def ticket(self, node: NodeId) -> TicketGranted: ...


async def answer_keeper(path: Path, guide: ClusterGuide) -> asyncio.Server:
    """Answer at `path`, for the owner alone, until the server is closed."""

    async def answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                writer.write(json.dumps(await _answer(line, guide)).encode() + b"\n")
                await writer.drain()
        except (OSError, ValueError):  # ValueError: a line without an end
            pass
        finally:
            writer.close()

    path.unlink(missing_ok=True)
    mask = os.umask(0o177)
    try:
        return await asyncio.start_unix_server(answer_all, path, limit=MAX_QUESTION_BYTES)
    finally:
        os.umask(mask)


async def _answer(line: bytes, guide: ClusterGuide) -> dict[str, object]:
    try:
        match json.loads(line):
            case {"sources": str(digest)}:
                sources = await guide.sources(Digest(digest))
                return {"sources": [_plain(source) for source in sources]}
            case {"ticket": str(node)}:
                granted = await guide.ticket(NodeId(node))
                return {
                    "host": granted.host,
                    "port": granted.port,
                    "ticket": granted.ticket.hex(),
                    "is_encrypted": granted.is_encrypted,
                }
            case _:
                raise ServiceError(f"no such question: {line[:80]!r}")
    except (HearthError, ValueError) as error:
        return {"error": str(error)}


def _plain(source: Source) -> dict[str, str]:
    return {"node": source.node, "host": source.held.host.hex(), "disk": source.held.disk.hex()}

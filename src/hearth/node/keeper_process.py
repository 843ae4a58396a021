"""Whether the keeper of the store lives, asked over its standard input at every heartbeat. Ends no process.

The thread that answers does nothing else, so an answer comes at once however slow disks and object storage
are: a keeper that gives none was stopped, or its interpreter hangs. Its answer says how long its books could
not be looked at, which a file that is slow to delete explains for a while, and threads that wait for each
other for ever.
"""

from __future__ import annotations

import asyncio
from asyncio.subprocess import Process
from contextlib import suppress

import msgspec

from hearth.core.messages import KeeperPulse
from hearth.policy.fleet.liveness import MAX_SILENCE_S, Silence
from hearth.system.cpus import queued_s


async def hang_of(keeper: Process, heartbeat_s: float, max_silence_s: float) -> str:
    """Return why the keeper hangs, once it does; one that has ended is for the caller to see."""
    assert keeper.stdin is not None, "asked for a pipe"
    assert keeper.stdout is not None, "asked for a pipe"
    silence = Silence(heartbeat_s, queued_s(keeper.pid) or 0.0)
    while True:
        with suppress(ConnectionError, RuntimeError):  # one that has just ended, by asyncio and by uvloop
            keeper.stdin.write(b"\n")
        while (pulse := await _pulse(keeper.stdout, heartbeat_s)) is None:
            silence.beat(queued_s(keeper.pid) or silence.queued_s, was_heard=False)
            if silence.seconds >= max_silence_s:
                return f"did not answer for {silence.seconds:.3g} s, limit: {max_silence_s:.3g} s"
        silence.beat(queued_s(keeper.pid) or silence.queued_s, was_heard=True)
        if pulse.books_held_s >= MAX_SILENCE_S:
            return f"could not look at its books for {pulse.books_held_s:.3g} s, limit: {MAX_SILENCE_S:g} s"
        await asyncio.sleep(heartbeat_s)


async def _pulse(answers: asyncio.StreamReader, patience_s: float) -> KeeperPulse | None:
    """Return the next answer; None: it did not come in time, or makes no sense."""
    try:
        async with asyncio.timeout(patience_s):
            while not (line := await answers.readline()):
                await asyncio.sleep(patience_s)  # it has ended, or is about to
        return msgspec.json.decode(line, type=KeeperPulse)
    except (TimeoutError, ValueError, msgspec.MsgspecError):
        return None

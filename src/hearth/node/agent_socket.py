"""Passes questions of the keeper and the workers about other nodes on to the head. Understands none of them.

They ask over a Unix socket of this machine: a question of `core/node_messages.py` is a line of JSON, and so
is its answer.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

import msgspec

from hearth.core.node_messages import Answer, Question, QuestionRefused

MAX_QUESTION_BYTES = 4096
#: Time for the head to answer.
ANSWER_S = 5.0

_questions = msgspec.json.Decoder(Question)


class AgentSocket:
    """Mutable; used on the event loop alone."""

    def __init__(self) -> None:
        self._ask_head: Callable[[Question], None] | None = None  #: None: the head is not reached
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Answer]] = {}

    async def listen(self, path: Path) -> asyncio.Server:
        """Answer at `path`, in a directory of the owner alone, until the server is closed."""
        return await asyncio.start_unix_server(self._answer_all, path, limit=MAX_QUESTION_BYTES)

    def head_found(self, ask: Callable[[Question], None]) -> None:
        """`ask` sends a question to the head, whose answer comes by `answered`."""
        self._ask_head = ask

    def head_lost(self) -> None:
        self._ask_head = None
        for number in self._asked:
            self.answered(QuestionRefused(number, "the head of the cluster was lost"))

    def answered(self, answer: Answer) -> None:
        """Take an answer of the head. One that comes too late is dropped."""
        asked = self._asked.get(answer.number)
        if asked is not None and not asked.done():
            asked.set_result(answer)

    async def ask(self, question: Question) -> Answer:
        number = next(self._numbers)
        if self._ask_head is None:
            return QuestionRefused(number, "the head of the cluster is not reached")
        asked: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked[number] = asked
        self._ask_head(msgspec.structs.replace(question, number=number))
        try:
            async with asyncio.timeout(ANSWER_S):
                return await asked
        except TimeoutError:
            return QuestionRefused(number, f"the head of the cluster has not answered within {ANSWER_S:g} s")
        finally:
            del self._asked[number]

    async def _answer_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                answer = await self.ask(_questions.decode(line))
                writer.write(msgspec.json.encode(answer) + b"\n")
                await writer.drain()
        except (OSError, ValueError):  # ValueError: it is no question, or a line without an end
            pass
        finally:
            writer.close()

"""The object store that some models come from: it answers well, slowly, or with lies. Knows no service."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from bench.bad_server import (
    BadServer,
    Behaviour,
    Exchange,
    cuts_the_body,
    flips_a_bit,
    hangs_up,
    promises_too_little,
    says,
    serve,
    serves_another_range,
    stalls_in_the_body,
    well,
)

SLOW_S = 2.0
NUM_PIECES = 8  #: of a body that comes slowly
#: More than are asked for while a fault lasts.
NUM_PLANNED = 1000


def slow(exchange: Exchange) -> None:
    exchange.server.is_closing.wait(SLOW_S)
    well(exchange)


def sends_pieces(exchange: Exchange) -> None:
    """Never silent for long, and done in the end: one that is never done is waited for by design."""
    body = exchange.whole[exchange.span]
    exchange.answer(body, num_sent=0)
    size = -(-len(body) // NUM_PIECES)
    for at in range(0, len(body), size):
        exchange.server.is_closing.wait(SLOW_S / NUM_PIECES)
        exchange.wfile.write(body[at : at + size])


SLOWNESS: tuple[Behaviour, ...] = (slow, slow, sends_pieces, sends_pieces, stalls_in_the_body)
LIES: tuple[Behaviour, ...] = (
    *(flips_a_bit, serves_another_range, promises_too_little, cuts_the_body, hangs_up),
    *(says(500), says(503), says(404), well),
)


@contextmanager
def behaving(server: BadServer, behaviours: tuple[Behaviour, ...], seed: int) -> Iterator[None]:
    """Have the server answer by these behaviours, drawn at random, until the context ends."""
    server.plan.extend(Random(seed).choices(behaviours, k=NUM_PLANNED))
    try:
        yield
    finally:
        server.plan.clear()


@contextmanager
def serving_models(directory: Path) -> Iterator[BadServer]:
    """Serve every model in a directory, each under its name."""
    files = {f"/{path.parent.name}/{path.name}": path.read_bytes() for path in directory.glob("*/*")}
    with serve(files) as server:
        server.socket.listen(64)  # all readers knock at once
        yield server

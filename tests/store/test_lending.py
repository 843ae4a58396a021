"""A host segment that processes share: one owns it and lends, others borrow, and any of them may die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from hearth.config import StoreConfig
from hearth.errors import BadCheckpoint, ChunkMissing, LoadCancelled, StoreError
from hearth.store.borrower import Borrower
from hearth.store.convert import convert
from hearth.store.lender import Lender
from hearth.store.loader import Loader, whole
from hearth.store.manifest import WEIGHTS, Manifest
from hearth.store.tiers import Tiers
from tests.models.zoo import build

SLOT_BYTES = 8 << 10
NUM_SLOTS = 2048  # the least that a configuration allows: 16 MiB


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("lending") / "model"
    convert(build("llama-gqa").directory, directory, chunk_bytes=SLOT_BYTES)
    return directory


@contextmanager
def lending(root: Path) -> Iterator[tuple[Tiers, Lender, Path]]:
    with tempfile.TemporaryDirectory(prefix="hearth-") as folder:  # a socket's name must be short
        path = Path(folder) / "host.sock"
        tiers = Tiers(StoreConfig(path=str(root), host_bytes=NUM_SLOTS * SLOT_BYTES), slot_bytes=SLOT_BYTES)
        lender = Lender(tiers, path)
        try:
            yield tiers, lender, path
        finally:
            lender.close()
            tiers.close()


def eventually(is_so: object) -> bool:
    """Whether a condition comes true soon: the other side acts on a thread of its own."""
    assert callable(is_so)
    deadline_s = time.monotonic() + 20
    while not is_so() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return bool(is_so())


def load(borrower: Borrower, where: Path) -> tuple[Manifest, torch.Tensor]:
    borrowed = borrower.open(where)
    base = torch.zeros(borrowed.manifest.num_bytes, dtype=torch.uint8)
    loader = Loader(torch.device("cpu"))
    loader.load(
        "borrowed",
        borrowed.manifest,
        whole(borrowed.manifest, base),
        lambda chunks: borrower.fetch(borrowed, chunks),
    ).wait()
    return borrowed.manifest, base


def test_a_borrower_loads_what_the_lender_reads(model: Path, tmp_path: Path) -> None:
    with lending(tmp_path) as (tiers, _, path):
        borrower = Borrower(path)

        _, base = load(borrower, model)

        borrower.close()
        assert base.numpy().tobytes() == (model / WEIGHTS).read_bytes()
        assert eventually(lambda: tiers.fetcher.book.num_leased == 0)


def test_two_borrowers_cost_one_read(model: Path, tmp_path: Path) -> None:
    with lending(tmp_path) as (tiers, _, path):
        first, second = Borrower(path), Borrower(path)

        manifest, _ = load(first, model)
        load(second, model)

        first.close()
        second.close()
        assert tiers.fetcher.counters.num_fills == len({chunk.digest for chunk in manifest.chunks})


def test_a_borrower_in_another_process_sees_the_bytes(model: Path, tmp_path: Path) -> None:
    with lending(tmp_path) as (_, _, path):
        printed = subprocess.run(
            [sys.executable, "-c", BORROWS, str(path), str(model), "all"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert printed.strip() == str(sum((model / WEIGHTS).read_bytes()))


def test_chunks_of_a_killed_borrower_are_taken_back(model: Path, tmp_path: Path) -> None:
    with lending(tmp_path) as (tiers, lender, path):
        process = subprocess.Popen(
            [sys.executable, "-c", BORROWS, str(path), str(model), "some"], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        process.stdout.readline()  # it holds some chunks now and sleeps
        assert tiers.fetcher.book.num_leased > 0

        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()

        assert eventually(lambda: tiers.fetcher.book.num_leased == 0 and lender.num_sessions == 0)
        tiers.fetcher.book.check()


#: A process that borrows a model: `all` of it, printing the sum of its bytes, or `some`, and then sleeps.
BORROWS = """
import sys, time
from pathlib import Path
from hearth.store.borrower import Borrower
path, model, how = sys.argv[1:]
borrower = Borrower(Path(path))
borrowed = borrower.open(model)
loan = borrower.fetch(borrowed, range(len(borrowed.manifest.chunks)))
total = 0
for number, chunk in enumerate(loan):
    total += int(chunk.data.long().sum())
    if how == "some" and number == 2:
        print("holding", flush=True)
        time.sleep(600)
    if how == "all":
        loan.release(chunk)
print(total)
"""


def test_a_borrower_is_told_what_the_lender_met(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    convert(build("llama-gqa").directory, broken, chunk_bytes=SLOT_BYTES)
    os.truncate(broken / WEIGHTS, 2 * SLOT_BYTES)
    with lending(tmp_path / "root") as (_, _, path):
        borrower = Borrower(path)

        with pytest.raises(ChunkMissing, match=r"chunk \d+ of `broken`"):
            load(borrower, broken)

        borrower.close()


def test_a_borrower_cannot_open_what_is_no_model(tmp_path: Path) -> None:
    with lending(tmp_path) as (_, _, path):
        borrower = Borrower(path)

        with pytest.raises(BadCheckpoint, match=r"no manifest.json"):
            borrower.open(tmp_path)

        borrower.close()


def test_a_loan_that_is_called_off_gives_everything_back(model: Path, tmp_path: Path) -> None:
    with lending(tmp_path) as (tiers, _, path):
        borrower = Borrower(path)
        borrowed = borrower.open(model)
        loan = borrower.fetch(borrowed, range(len(borrowed.manifest.chunks)))
        chunks = iter(loan)
        next(chunks)

        loan.cancel()

        with pytest.raises(LoadCancelled):
            list(chunks)
        borrower.close()
        assert eventually(lambda: tiers.fetcher.book.num_leased == 0)


def test_a_borrower_notices_that_the_lender_is_gone(model: Path, tmp_path: Path) -> None:
    with lending(tmp_path) as (_, lender, path):
        borrower = Borrower(path)
        borrowed = borrower.open(model)
        loan = borrower.fetch(borrowed, range(len(borrowed.manifest.chunks)))
        chunks = iter(loan)
        next(chunks)

        lender.close()

        with pytest.raises(StoreError, match="is gone"):
            list(chunks)
        borrower.close()


def test_nobody_lends_at_a_path_without_a_socket(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nobody lends host memory"):
        Borrower(tmp_path / "absent.sock")


def test_a_borrower_that_talks_nonsense_is_dropped_and_others_are_not(model: Path, tmp_path: Path) -> None:
    with lending(tmp_path) as (_, lender, path):
        borrower = Borrower(path)
        rude = borrower._connect()

        rude.sendall(b"what?\n")

        assert eventually(lambda: lender.num_sessions == 0)
        rude.close()
        load(borrower, model)
        borrower.close()

"""A worker looks for garbage when it has nothing to do."""

from __future__ import annotations

import gc
import io
import os
import sys
import time
import weakref
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest
import torch

from hearth.memory.arena import ArenaPool
from hearth.system import garbage
from hearth.system.garbage import LATE_COLLECTIONS, collect_when_idle
from hearth.worker import __main__ as worker
from tests.store.stored import PATIENCE_S, converted, tiers_at
from tests.system.test_garbage import Cycle, grow, lost_cycle
from tests.worker.harness import BUDGET_BYTES, greedy
from tests.worker.in_process import working_in_process
from tests.worker.test_start import setup_of


def wait_until_gone(lost: weakref.ref[Cycle]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while lost() is not None:
        assert time.monotonic() < deadline_s, "the worker is idle and does not look for garbage"
        time.sleep(0.01)


def test_a_worker_looks_for_garbage_once_all_requests_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage, "QUIET_S", 0.01)
    with (
        collect_when_idle(),
        tiers_at(tmp_path) as tiers,
        working_in_process(
            tiers, lambda terms: ArenaPool(torch.device("cpu"), BUDGET_BYTES, terms)
        ) as gateway,
    ):
        gateway.load("llama-gqa", converted("llama-gqa"))
        run = gateway.start("llama-gqa", [5, 6, 7], greedy(40))
        gateway.hear()
        lost, _live = lost_cycle(), grow(4 * garbage.MIN_YOUNG)
        gateway.until_ended(run)
        wait_until_gone(lost)
        assert gateway.ping().fallbacks["late_collections"] == LATE_COLLECTIONS.num


def test_the_process_of_a_worker_puts_collections_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    class Loop:
        def run(self) -> None:
            found.append(gc.get_threshold()[0])

    def ended(code: int) -> NoReturn:
        raise SystemExit(code)

    line = msgspec.json.encode(setup_of("cpu", tmp_path)) + b"\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(line)))
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    monkeypatch.setattr(os, "dup", lambda fd: fd)
    monkeypatch.setattr(os, "dup2", lambda fd, other: other)
    monkeypatch.setattr(os, "_exit", ended)
    monkeypatch.setattr(worker, "die_with_parent", lambda: None)
    monkeypatch.setattr(worker, "close_all_but", lambda descriptors: None)
    monkeypatch.setattr(worker, "_end_with_input", lambda: None)
    monkeypatch.setattr(worker, "_start", lambda setup: Loop())
    with pytest.raises(SystemExit) as caught:
        worker.main()
    assert (caught.value.code, found) == (0, [garbage.MAX_YOUNG])

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
import pytest

from hearth.text.render_pool import RenderPool

AMPLE_S = 60.0


@pytest.fixture
def pool() -> Iterator[RenderPool]:
    pool = RenderPool(2)
    yield pool
    pool.close()


def renderers() -> set[int]:
    """Return the renderer processes that this one has started."""
    found = set()
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it is just ending
            if any("renderer.py" in part for part in child.cmdline()):
                found.add(child.pid)
    return found


def test_processes_start_when_first_needed_and_are_used_again() -> None:
    before, pool = renderers(), RenderPool(2)
    assert renderers() <= before, "those of earlier tests may end meanwhile"

    assert [pool.render("{{ n }}", {"n": n}, AMPLE_S) for n in (1, 2)] == [("text", "1"), ("text", "2")]

    assert len(renderers() - before) == 1
    pool.close()
    assert renderers() <= before


def test_no_more_processes_run_than_the_pool_may_have(pool: RenderPool) -> None:
    before = renderers()

    with ThreadPoolExecutor(8) as threads:
        replies = list(threads.map(lambda n: pool.render("{{ n }}", {"n": n}, AMPLE_S), range(64)))

    assert replies == [("text", str(n)) for n in range(64)]
    assert len(renderers() - before) <= 2


def test_a_process_that_was_killed_while_idle_is_replaced(pool: RenderPool) -> None:
    before = renderers()
    pool.render("", {}, AMPLE_S)
    for pid in renderers() - before:
        os.kill(pid, signal.SIGKILL)
        psutil.wait_procs([psutil.Process(pid)], timeout=60)

    assert pool.render("a", {}, AMPLE_S) == ("text", "a")


@pytest.mark.e2e
def test_a_process_does_not_outlive_the_one_that_started_it() -> None:
    code = (
        "import os, psutil; from hearth.text.render_pool import POOL; POOL.render('', {}, 60.0);"
        "print(psutil.Process().children()[0].pid, flush=True); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=False)
    pid = int(killed.stdout)

    with suppress(psutil.NoSuchProcess):  # it has ended already
        psutil.Process(pid).wait(timeout=60)


def test_neither_the_pool_nor_its_users_import_jinja2() -> None:
    code = "import sys, hearth.text.tokenizer; sys.exit('jinja2' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

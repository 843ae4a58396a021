from __future__ import annotations

import subprocess
import threading

from hearth.worker.runtime import wait_for_end
from hearth.worker.start_times import StartTimes


def test_memory_is_waited_for_until_the_process_that_has_it_is_gone() -> None:
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    waiting = threading.Thread(target=wait_for_end, args=(process.pid,), daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    assert process.stdin is not None
    process.stdin.close()
    waiting.join(60.0)
    assert not waiting.is_alive()
    process.wait()
    wait_for_end(process.pid)  # it is gone for good
    wait_for_end(None)


def test_a_part_beside_the_others_is_told_and_takes_nothing_from_them() -> None:
    times = StartTimes()
    times.note("context")
    with times.beside("pages"):
        times.note("products")
    times.note("kernels")
    assert list(times.seconds) == ["context", "products", "pages", "kernels"]
    in_a_row_s = sum(times.seconds[part] for part in ("context", "products", "kernels"))
    assert abs(in_a_row_s - times.total_s) < 1e-9

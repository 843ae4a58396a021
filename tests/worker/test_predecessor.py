from __future__ import annotations

import subprocess
import threading

from hearth.worker.predecessor import Predecessor


def test_the_end_of_a_process_is_waited_for_and_seen() -> None:
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    predecessor = Predecessor(process.pid)
    assert not predecessor.is_gone
    waiting = threading.Thread(target=predecessor.wait, daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    assert process.stdin is not None
    process.stdin.close()
    waiting.join(60.0)
    assert not waiting.is_alive()
    assert predecessor.is_gone
    process.wait()
    assert Predecessor(process.pid).is_gone, "it was reaped before"


def test_nobody_is_waited_for_where_there_was_nobody() -> None:
    assert Predecessor(None).is_gone
    Predecessor(None).wait()

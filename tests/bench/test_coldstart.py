"""The cold start bench reads from a service's log when its parts came up."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from bench.coldstart.start_log import breakdown

LOG = """\
2026-11-16 11:43:00,000 INFO hearth.control.worker_template template_ready pid=1
2026-11-16 11:43:35,361 INFO hearth.cli.serve settings log.level by --set
2026-11-16 11:43:37,066 INFO hearth.cli.server serving listening=127.0.0.1:1 url=http://127.0.0.1:1
Traceback of somebody
2026-11-16 11:43:39,632 INFO hearth.control.worker_template template_ready pid=2
2026-11-16 11:43:39,656 INFO hearth.control.worker_template worker_forked worker=w0 pid=3
2026-11-16 11:43:40,084 INFO hearth.control.supervisor worker_ready worker=w0 pid=3 device=GPU
2026-11-16 11:43:40,086 INFO w0 hearth.worker worker_started total_s=0.418 context_s=0.300 pages_s=0.100
2026-11-16 11:43:50,000 INFO w0.1 hearth.worker worker_started total_s=9.000
"""


def test_a_start_is_told_by_its_parts_and_not_by_those_of_another(tmp_path: Path) -> None:
    (tmp_path / "service.log").write_text(LOG)
    began_s = datetime(2026, 11, 16, 11, 43, 35).timestamp()
    found = breakdown(tmp_path / "service.log", began_s)
    assert found == pytest.approx(
        {
            "serving": 2.066,
            "template": 4.632,
            "forked": 4.656,
            "worker_ready": 5.084,
            "worker_total": 0.418,
            "worker_context": 0.3,
            "worker_pages": 0.1,
        }
    )

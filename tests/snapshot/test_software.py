from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hearth
from hearth.snapshot.software import software, sources_digest


def test_any_change_of_what_steps_are_made_of_is_another_digest(tmp_path: Path) -> None:
    package = tmp_path / "hearth"
    shutil.copytree(Path(hearth.__file__).parent, package)
    before = sources_digest(package)
    assert before == software("cpu").sources
    (package / "api" / "another.py").touch()
    assert sources_digest(package) == before, "nothing that requests go through"
    found = {before}
    # Behind the first: where libraries find their memory, how nodes are read, and what profiles say.
    names = (
        *("kernels/norm.py", "policy/memory/space_slots.py", "memory/cuda_pages.py", "system/cuda/graphs.py"),
        *("snapshot/native_rebuild.c", "system/cuda/driver.py", "worker/snapshot_graphs.py"),
        *("worker/snapshot_maker.py", "worker/measured_costs.py"),
    )
    for name in names:
        with (package / name).open("a") as file:
            file.write("#")
        found.add(sources_digest(package))
    (package / "models" / "another.py").touch()
    assert len({*found, sources_digest(package)}) == 2 + len(names)


def test_a_cpu_depends_on_no_software_of_gpus() -> None:
    found = software("cpu")
    assert (found.driver, found.cuda, found.cublas, found.triton) == ("", "", "", "")
    assert found.torch


UPGRADE = """
import sys
from pathlib import Path

import pytest
from hearth.worker.template import import_worker
import_worker()
with (Path(sys.argv[1]) / "models" / "decoder.py").open("a") as file:
    file.write("# of the next version")
from hearth.snapshot.software import software
print(software("cpu").sources)
"""


@pytest.mark.e2e
def test_workers_forked_from_code_that_was_replaced_since_are_of_the_code_that_they_run(
    tmp_path: Path,
) -> None:
    """As when Hearth is upgraded under a service, whose snapshots the next one would take for its own."""
    package = tmp_path / "hearth"
    shutil.copytree(Path(hearth.__file__).parent, package)
    before = sources_digest(package)
    run = subprocess.run(
        [sys.executable, "-c", UPGRADE, str(package)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert run.stdout.strip() == before, run.stderr
    assert sources_digest(package) != before

from __future__ import annotations

import shutil
from pathlib import Path

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
        *("kernels/norm.py", "policy/memory/space_slots.py", "memory/cuda_pages.py", "cuda_graphs.py"),
        *("snapshot/native_rebuild.c", "cuda_driver.py", "worker/snapshot_graphs.py"),
        *("worker/snapshot_maker.py", "worker/measured_costs.py", "worker/resident_memory.py"),
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

from __future__ import annotations

import shutil
from pathlib import Path

import hearth
from hearth.snapshot.software import software, sources_digest


def test_any_change_of_what_steps_are_made_of_is_another_digest(tmp_path: Path) -> None:
    package = tmp_path / "hearth"
    for name in ("engine", "kernels", "models"):
        shutil.copytree(Path(hearth.__file__).parent / name, package / name)
    shutil.copy(Path(hearth.__file__).parent / "sizes.py", package)
    before = sources_digest(package)
    assert before == software("cpu").sources
    with (package / "kernels" / "norm.py").open("a") as file:
        file.write("#")
    changed = sources_digest(package)
    (package / "models" / "another.py").touch()
    assert len({before, changed, sources_digest(package)}) == 3


def test_a_cpu_depends_on_no_software_of_gpus() -> None:
    found = software("cpu")
    assert (found.driver, found.cuda, found.cublas, found.triton) == ("", "", "", "")
    assert found.torch

"""The package as users install it: what the wheel holds, and that it answers in an environment of its own.

That environment sees the packages that are installed for the tests, so that torch is not installed twice.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

from hearth.cli import demo
from hearth.control.datadir import DataDir
from hearth.control.deploy.deploy import DeployOrder
from hearth.control.deploy.deployer import carry_out
from hearth.control.deploy.registry import Registry
from hearth.core.version import VERSION
from tests.models.speaking import save_speaking

ROOT = Path(__file__).parents[1]

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    (built,) = folder.iterdir()
    return built


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment in which the wheel is installed: its folder of programs."""
    root = tmp_path_factory.mktemp("environment")
    venv.create(root, symlinks=True)
    pip("--python", str(root / "bin" / "python"), "install", "--no-deps", "--no-index", str(wheel))
    (packages,) = root.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return root / "bin"


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What a program of the environment says, far from the sources."""
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "HEARTH"))}
    return subprocess.run(
        [str(program), *arguments],
        cwd=program.parent,
        env=inherited | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_the_wheel_holds_the_package_whole_and_nothing_beside_it(wheel: Path) -> None:
    source = ROOT / "src"
    files = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    noted = f"hearth_inference-{VERSION}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        described = HeaderParser().parsestr(archive.read(f"{noted}/METADATA").decode())
        programs = archive.read(f"{noted}/entry_points.txt").decode()
    assert {
        "hearth/py.typed",
        "hearth/store/tiers/read_hashed.c",
        "hearth/snapshot/native_rebuild.c",
        "hearth/sim/profiles/h200.json",
    } <= held
    assert {name for name in held if not name.startswith(noted)} == {
        file for file in files if "__pycache__" not in file and ".egg-info" not in file
    }
    assert f"{noted}/licenses/LICENSE" in held
    assert (described["Name"], described["Version"]) == ("hearth-inference", VERSION)
    assert described["License-Expression"] == "Apache-2.0"
    assert programs.split() == ["[console_scripts]", "hearth", "=", "hearth.cli:main"]


@pytest.fixture
def data_dir(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with a tiny model in place of the demo's, which takes long to convert."""
    data_dir = DataDir.open(tmp_path / "data")
    order = DeployOrder(str(save_speaking(tmp_path_factory.mktemp("model"))), demo.NAME, dtype="float32")
    with Registry(data_dir) as registry:
        registry.add(carry_out(order, data_dir, lambda *_: None))
    return data_dir.path


def test_the_installed_command_serves_and_answers(environment: Path, data_dir: Path) -> None:
    code = "from hearth.cli import demo; print(demo.__file__); print(demo.bundled_model())"
    module, model = run(environment / "python", "-c", code).stdout.splitlines()
    assert Path(module).is_relative_to(environment.parent)
    assert Path(model).suffix == ".gguf"

    shown = run(environment / "hearth", "demo", "--once", "--port", "0", "--data-dir", str(data_dir))

    assert shown.returncode == 0, shown.stderr
    assert f"> {demo.QUESTION}\n" in shown.stdout
    for word in ("load", "prefill", "decode", "first_token", "█"):
        assert word in shown.stdout

"""A dry run names every kernel variant that a model can ever need, so that none is compiled behind a request.

Triton's compiler is off in this process, for its interpreter is on: the rig runs in another one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from hearth.engine.compile import CompileTask, list_key
from hearth.engine.dry_run import KernelNeeds
from hearth.models.families import arch_from_config
from tests.engine.variant_rig import LIMITS, LLAMA

pytestmark = pytest.mark.e2e

Report = dict[str, Any]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    run = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tests.engine.variant_rig",
            str(tmp_path_factory.mktemp("kernels")),
        ],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
    )
    found: Report = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("model", ["plain", "odd"])
def test_random_traffic_asks_for_no_variant_that_a_dry_run_does_not(report: Report, model: str) -> None:
    assert report[model]["asked"], "the traffic has launched something"
    assert report[model]["unforeseen"] == []


@pytest.mark.parametrize("model", ["plain", "odd"])
def test_what_is_captured_takes_no_memory_but_at_fixed_addresses(report: Report, model: str) -> None:
    assert report[model]["allocating"] == []


def test_kernels_are_hashed_in_one_order_in_every_process(report: Report) -> None:
    """Else Triton 3.6 has another hash for a kernel that is not the first, and nobody finds it again."""
    assert report["hashed_late"] == []


def test_a_variant_is_compiled_once_and_found_by_other_processes(report: Report) -> None:
    cache = report["cache"]
    assert cache["compiled"] == 1
    assert cache["compiled_again"] == 0
    assert cache["loaded"] == 1
    assert cache["num_bytes"], "a binary for the device was kept"


def test_a_launch_finds_the_variant_that_was_loaded_from_a_list(report: Report) -> None:
    assert report["cache"]["asked_though_loaded"] is False


def test_a_variant_that_two_lists_name_stays_the_kernel_that_graphs_have_captured(report: Report) -> None:
    """Triton 3.9 unloads a kernel that it has another one for."""
    assert report["cache"]["stays_the_same"] is True


def test_a_kernel_that_was_cut_short_on_disk_is_compiled_anew(report: Report) -> None:
    mended = {"loaded": None, "found": None, "compiled": 1, "loaded_then": 1}
    assert report["cut_short"] == [mended, mended]


def test_a_compiler_that_crashes_is_told_of_and_not_waited_for(report: Report) -> None:
    assert report["crash"] == "told"


def test_models_that_differ_in_depth_alone_share_a_list() -> None:
    keys = set()
    for num_layers in (4, 40):
        arch = arch_from_config({**LLAMA, "num_hidden_layers": num_layers})
        keys.add(list_key(KernelNeeds.of(arch, "bfloat16", "none", LIMITS, 132, 90)))
    assert len(keys) == 1


def test_a_task_survives_its_way_to_the_process_that_compiles() -> None:
    needs = KernelNeeds.of(arch_from_config(dict(LLAMA)), "bfloat16", "int8", LIMITS, 132, 90)
    task = CompileTask("/somewhere", needs)
    assert msgspec.json.decode(msgspec.json.encode(task), type=CompileTask) == task

"""Cores by affinity and cgroups, read from trees like the kernel's; how threads wait."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from hearth.system import cpus
from hearth.system.cpus import WaitPolicy, num_usable_cores, queued_s, set_wait_policy

PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
#: Loads what of torch brings its OpenMP, as importing torch does, in a fifth of the time.
LOADS_OPENMP = """
from ctypes import CDLL
from importlib.util import find_spec
from pathlib import Path
CDLL(str(Path(find_spec("torch").origin).parent / "lib" / "libtorch_cpu.so"))
"""
#: Works for as long as its input is open, on the core that its argument names.
WORKS = """
import os, select, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
while not select.select([0], [], [], 0)[0]:
    sum(range(10_000))
"""


class Kernel:
    """A `/proc/self` and the cgroups that its `mountinfo` names, under one directory."""

    def __init__(self, root: Path) -> None:
        self.proc, self._root = root / "proc", root
        self.proc.mkdir()

    def has(self, cgroup: str, mountinfo: str) -> None:
        """Write what the process would read of itself; `@` stands for the directory."""
        (self.proc / "cgroup").write_text(cgroup)
        (self.proc / "mountinfo").write_text(mountinfo.replace("@", str(self._root)))

    def write(self, name: str, text: str) -> None:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    @property
    def num_cores(self) -> int:
        return num_usable_cores(self.proc)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    return Kernel(tmp_path)


V2 = "30 23 0:26 / @/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1 = (
    "33 25 0:30 / @ rw - tmpfs tmpfs rw,mode=755\n"
    "34 33 0:31 / @/cpuset rw - cgroup cgroup rw,cpuset\n"
    "35 33 0:32 / @/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
)


def test_without_cgroups_affinity_counts(kernel: Kernel) -> None:
    assert kernel.num_cores == 16


def test_a_limit_of_version_2_counts(kernel: Kernel) -> None:
    kernel.has("0::/job\n", V2)
    kernel.write("cgroup/job/cpu.max", "400000 100000")
    assert kernel.num_cores == 4


@pytest.mark.parametrize(("quota", "cores"), [("max", 16), ("150000", 2), ("1000", 1), ("9900000", 16)])
def test_a_share_of_a_core_is_a_whole_one_and_no_limit_raises_the_affinity(
    kernel: Kernel, quota: str, cores: int
) -> None:
    kernel.has("0::/job\n", V2)
    kernel.write("cgroup/job/cpu.max", f"{quota} 100000")
    assert kernel.num_cores == cores


@pytest.mark.parametrize(("outer", "inner"), [("200000", "600000"), ("600000", "200000"), ("200000", "max")])
def test_the_least_of_nested_limits_counts(kernel: Kernel, outer: str, inner: str) -> None:
    kernel.has("0::/a/b/c\n", V2)
    kernel.write("cgroup/a/cpu.max", f"{outer} 100000")
    kernel.write("cgroup/a/b/c/cpu.max", f"{inner} 100000")
    assert kernel.num_cores == 2


def test_a_limit_of_another_cgroup_does_not_count(kernel: Kernel) -> None:
    kernel.has("0::/a\n", V2)
    kernel.write("cgroup/b/cpu.max", "100000 100000")
    kernel.write("cgroup/a/below/cpu.max", "100000 100000")
    assert kernel.num_cores == 16


def test_limits_of_version_1_count_up_the_hierarchy(kernel: Kernel) -> None:
    kernel.has("5:cpuset:/\n4:cpu,cpuacct:/a/b\n0::/\n", V1)
    for cgroup, quota in (("a", 500_000), ("a/b", -1)):
        kernel.write(f"cpu,cpuacct/{cgroup}/cpu.cfs_quota_us", str(quota))
        kernel.write(f"cpu,cpuacct/{cgroup}/cpu.cfs_period_us", "200000")
    assert kernel.num_cores == 3


def test_a_container_that_sees_only_its_own_cgroup_has_its_limit(kernel: Kernel) -> None:
    kernel.has("4:cpu,cpuacct:/docker/1f/job\n", V1.replace("0:32 / ", "0:32 /docker/1f "))
    kernel.write("cpu,cpuacct/job/cpu.cfs_quota_us", "700000")
    kernel.write("cpu,cpuacct/job/cpu.cfs_period_us", "100000")
    kernel.write("cpu,cpuacct/cpu.cfs_quota_us", "200000")
    kernel.write("cpu,cpuacct/cpu.cfs_period_us", "100000")
    assert kernel.num_cores == 2


@pytest.mark.parametrize("path", ["/docker/1f", "/../elsewhere"])
def test_a_cgroup_that_is_not_seen_is_taken_for_the_one_that_is(kernel: Kernel, path: str) -> None:
    kernel.has(f"0::{path}\n", V2)
    kernel.write("cgroup/cpu.max", "300000 100000")
    assert kernel.num_cores == 3


def test_this_machine_lets_us_use_at_least_one_core_and_no_more_than_the_affinity() -> None:
    assert 1 <= num_usable_cores() <= len(os.sched_getaffinity(0))


def test_threads_are_told_to_sleep_before_torch_is_imported() -> None:
    environment: dict[str, str] = {}
    assert set_wait_policy(environment, {"numpy"}) == WaitPolicy(None)
    assert environment == PASSIVE


def test_where_torch_came_first_threads_spin_and_children_do_not() -> None:
    environment: dict[str, str] = {}
    policy = set_wait_policy(environment, {"torch"})
    assert policy.spin_reason is not None
    assert "import hearth first" in policy.spin_reason
    assert environment == PASSIVE


@pytest.mark.parametrize(
    ("chosen", "sleeps"),
    [
        ({"OMP_WAIT_POLICY": "active"}, False),
        ({"OMP_WAIT_POLICY": "passive"}, True),
        ({"GOMP_SPINCOUNT": "0"}, True),
        (PASSIVE, True),  # as a parent has set it
    ],
)
def test_a_choice_of_the_user_stays(chosen: Mapping[str, str], sleeps: bool) -> None:
    environment = dict(chosen)
    policy = set_wait_policy(environment, set())
    assert (policy.spin_reason is None, policy.is_chosen) == (sleeps, True)
    assert {name: environment[name] for name in chosen} == chosen
    assert environment.keys() <= {*chosen, "KMP_BLOCKTIME"}


@pytest.mark.parametrize("chosen", [{"KMP_BLOCKTIME": "9"}, {"KMP_BLOCKTIME": "0"}, {"OMP_WAIT_POLICY": ""}])
def test_a_choice_for_another_openmp_does_not_leave_torchs_own_spinning(chosen: Mapping[str, str]) -> None:
    environment = dict(chosen)
    assert set_wait_policy(environment, set()) == WaitPolicy(None)
    assert environment == {**PASSIVE, **{name: value for name, value in chosen.items() if value}}


@pytest.mark.parametrize(
    ("policy", "num_lines"),
    [
        (WaitPolicy(None), 0),
        (WaitPolicy("`OMP_WAIT_POLICY=ACTIVE` is set", is_chosen=True), 0),
        (WaitPolicy("torch was imported before hearth"), 1),
    ],
)
def test_spinning_that_nobody_chose_is_logged_once(
    policy: WaitPolicy, num_lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpus, "wait_policy", lambda: policy)
    cpus.log_if_threads_spin.cache_clear()
    with caplog.at_level(logging.WARNING, "hearth.system.cpus"):
        cpus.log_if_threads_spin()
        cpus.log_if_threads_spin()
    assert len(caplog.messages) == num_lines


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("code", "sleeps"),
    [
        pytest.param(f"import hearth\n{LOADS_OPENMP}", True, id="hearth first"),
        pytest.param("from hearth import LLM", True, id="hearth alone"),
        pytest.param(f"{LOADS_OPENMP}\nimport hearth", False, id="torch first"),
    ],
)
def test_openmp_sleeps_in_a_process_that_imports_hearth_before_torch(code: str, sleeps: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in PASSIVE}
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        check=True,
    )
    told = [line for line in run.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    if not told:
        pytest.skip("this torch has an OpenMP that does not show how long its threads spin")
    assert told[0].endswith("= '0'") == sleeps, told


@pytest.mark.e2e
def test_a_process_that_multiplies_leaves_no_map_of_its_code_behind() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "ONEDNN_JIT_PROFILE"}
    code = (
        "import hearth, os, torch\n"
        "with torch.inference_mode():\n"
        "    torch.nn.Linear(256, 256)(torch.ones(64, 256))\n"
        "print(os.getpid())"
    )
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    assert not Path(f"/tmp/perf-{int(ran.stdout)}.map").exists()


@pytest.mark.parametrize("odd", ["", "nonsense", "30 23 0:26 / @/cgroup rw - cgroup2", "1 - ", "0:"])
def test_lines_that_no_kernel_should_write_limit_nothing(kernel: Kernel, odd: str) -> None:
    kernel.has(f"{odd}\n", f"{odd}\n")
    assert kernel.num_cores == 16


@pytest.mark.parametrize("text", ["100000 0", "0 100000", "-1 100000", "max", "many few", ""])
def test_a_limit_that_makes_no_sense_limits_nothing(kernel: Kernel, text: str) -> None:
    kernel.has("0::/a\n", V2)
    kernel.write("cgroup/a/cpu.max", text)
    assert kernel.num_cores == 16


def test_a_mount_point_with_a_blank_is_found(kernel: Kernel) -> None:
    kernel.has("0::/a\n", V2.replace("@/cgroup", "@/c\\040group"))
    kernel.write("c group/a/cpu.max", "300000 100000")
    assert kernel.num_cores == 3


def test_of_two_processes_at_work_on_one_core_each_waits_for_it() -> None:
    core = str(min(os.sched_getaffinity(0)))
    command = [sys.executable, "-c", WORKS, core]
    working = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(2)]
    try:
        while not all((queued_s(process.pid) or 0.0) > 0.05 for process in working):
            assert all(process.poll() is None for process in working)
            time.sleep(0.02)
    finally:
        for process in working:
            process.communicate()


def test_a_process_that_is_stopped_waits_for_no_core_and_one_that_is_gone_has_none() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        before_s = queued_s(process.pid)
        time.sleep(0.1)
        assert queued_s(process.pid) == before_s
    finally:
        process.kill()
        process.communicate()
    assert queued_s(process.pid) is None

"""Which versions of Triton have their kernels launched past its own bookkeeping, and keys of launches.

How launches go is tested where Triton's compiler is on: tests/engine/test_dry_run.py.
"""

from __future__ import annotations

import pytest
import torch

from hearth.kernels.launch_cache import launch_key, launch_obstacle


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.9.0+git1234"])
def test_known_versions_of_triton_have_no_obstacle(version: str) -> None:
    assert launch_obstacle(version) is None


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0"])
def test_other_versions_launch_by_their_own_way_and_it_is_said_why(version: str) -> None:
    assert f"Triton {version} is not one of 3.6 to 3.9" in (launch_obstacle(version) or "")


def test_whatever_triton_specialises_on_makes_another_key() -> None:
    base = torch.zeros(64, dtype=torch.bfloat16)
    kernel, options = object(), {"BLOCK": 64, "num_warps": 4}
    usual = (base, None, 32, 0.5)
    others = [
        ((base[1:], None, 32, 0.5), options, False),  # not aligned
        ((base.view(torch.float16), None, 32, 0.5), options, False),
        ((base, base, 32, 0.5), options, False),
        ((base, None, 1, 0.5), options, False),
        ((base, None, 33, 0.5), options, False),
        ((base, None, 2**40, 0.5), options, False),
        (usual, {"BLOCK": 128, "num_warps": 4}, False),
        (usual, {"BLOCK": 64, "num_stages": 4}, False),
        (usual, options, True),
    ]
    keys = {launch_key(kernel, *one) for one in [(usual, options, False), *others]}
    assert len(keys) == 1 + len(others)
    assert launch_key(kernel, (base[8:], None, 48, 0.25), options, False) in keys
    assert launch_key(object(), usual, options, False) not in keys

"""The view of what a model was deployed from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hearth.control.deploy.deployed import Deployed
from hearth.control.deploy.upstream_view import upstream_view
from hearth.store.tiers.upstream import Change, Upstream

DIGEST = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("source", "quant", "remedy"),
    [
        ("s3://models/m", "int8", "hearth deploy s3://models/m --name tiny --overwrite"),
        (f"s3://models/m@{DIGEST}", "none", "hearth deploy s3://models/m --name tiny --overwrite"),
        ("hf:org/m@v1", "none", "hearth deploy hf:org/m@v1 --name tiny --overwrite"),
        ("hf:org/m", "fp8", "hearth deploy hf:org/m --name tiny --quant fp8 --overwrite"),
    ],
)
def test_a_change_comes_with_the_command_that_takes_it(
    deployed: Deployed, source: str, quant: str, remedy: str
) -> None:
    made = replace(deployed, source=source, facts=replace(deployed.facts, quant=quant))
    view = upstream_view(made, Upstream("v1", Change("v2", 7.0)), has_looked=False, failure="no answer")
    assert (view.state, view.deployed_version, view.current_version) == ("changed", "v1", "v2")
    assert (view.noticed_at_s, view.reason, view.remedy) == (7.0, "no answer", remedy)


def test_only_who_has_looked_knows_that_nothing_has_changed(deployed: Deployed) -> None:
    looked, unlooked = (upstream_view(deployed, Upstream("v1"), has, None) for has in (True, False))
    assert (looked.state, looked.remedy) == ("unchanged", None)
    assert (unlooked.state, unlooked.remedy) == ("unknown", None)

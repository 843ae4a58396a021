"""The state of a model's source, for `hearth show`."""

from __future__ import annotations

from hearth.control.deploy.deployed import Deployed, DeployedAdapter
from hearth.control.observe.views import UpstreamView
from hearth.store.tiers.upstream import Upstream, parse_address


def upstream_view(
    deployed: Deployed | DeployedAdapter, known: Upstream, has_looked: bool, failure: str | None
) -> UpstreamView:
    """`has_looked`: upstream has just answered. `failure`: why it has not; None also if it was not asked."""
    change = known.change
    if change is None:
        return UpstreamView("unchanged" if has_looked else "unknown", known.version, reason=failure)
    return UpstreamView(
        "changed",
        known.version,
        current_version=change.version,
        noticed_at_s=change.noticed_at_s,
        reason=failure,
        remedy=_deploy_command(deployed),
    )


def _deploy_command(deployed: Deployed | DeployedAdapter) -> str:
    source, kept = deployed.source, ""
    if isinstance(deployed, DeployedAdapter):
        kept = f" --base {deployed.base}"
    elif source.startswith("hf:") and deployed.facts.quant in ("int8", "fp8", "int4"):
        kept = f" --quant {deployed.facts.quant}"  # others are as in the source; a URL has converted models
    if not source.startswith("hf:"):
        source = parse_address(source).url
    return f"hearth deploy {source} --name {deployed.name}{kept} --overwrite"

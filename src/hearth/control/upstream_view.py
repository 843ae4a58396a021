"""The view of what a model was deployed from, for `hearth show`. Asks nobody: that is the caller's part."""

from __future__ import annotations

from hearth.control.deployed import Deployed
from hearth.control.views import UpstreamView
from hearth.store.upstream import Upstream, parse_address


def upstream_view(deployed: Deployed, known: Upstream, has_looked: bool, failure: str | None) -> UpstreamView:
    """Return the view of a model's upstream.

    Args:
        deployed: the model.
        known: what is noted of its upstream, the look included.
        has_looked: upstream was asked just now, and has answered.
        failure: why it has not answered; None also where nobody has asked.
    """
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


def _deploy_command(deployed: Deployed) -> str:
    """Return the command that deploys the newest version in the place of this model."""
    source, quant = deployed.source, deployed.facts.quant
    if not source.startswith("hf:"):
        return f"hearth deploy {parse_address(source).url} --name {deployed.name} --overwrite"
    kept = "" if quant == "none" else f" --quant {quant}"  # a URL has converted models, quantised or not
    return f"hearth deploy {source} --name {deployed.name}{kept} --overwrite"

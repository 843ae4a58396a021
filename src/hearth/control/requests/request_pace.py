"""When the tokens of a request are due, and which callers may have them sooner."""

from __future__ import annotations

from dataclasses import replace

from hearth.control.deploy.catalog import CatalogEntry
from hearth.control.requests.caller import Caller
from hearth.control.requests.generation import GenerationRequest
from hearth.core.errors import BadSampling, Forbidden
from hearth.core.types import Pace


def pace_of(entry: CatalogEntry, wanted: GenerationRequest, caller: Caller) -> Pace:
    """Raises Forbidden if a caller other than an admin asks for a faster pace: it takes turns from others."""
    usual = entry.pace
    if wanted.is_batch or caller.terms.service_class == "batch":
        return _batch_pace(usual, wanted, caller)
    tokens_per_s = usual.tokens_per_s if wanted.tokens_per_s is None else wanted.tokens_per_s
    first_token_s = usual.first_token_s if wanted.first_token_s is None else wanted.first_token_s
    if not caller.has_role("admin"):
        for field, is_sooner, limit, given in (
            ("pace", tokens_per_s > usual.tokens_per_s, f"at most {usual.tokens_per_s:g}", tokens_per_s),
            (
                "first_token_target",
                first_token_s < usual.first_token_s,
                f"at least {usual.first_token_s:g}",
                first_token_s,
            ),
        ):
            if is_sooner:
                raise Forbidden(
                    f"`{field}` must be {limit} for `{entry.name}`, given: {given:g}; more would be "
                    "taken from others and needs a key with the role `admin`, or another setting: "
                    f"`models.NAME.{field}`"
                )
    return Pace(first_token_s, tokens_per_s, usual.max_pause_s)


def _batch_pace(usual: Pace, wanted: GenerationRequest, caller: Caller) -> Pace:
    if wanted.tokens_per_s:
        remedy = "leave it out"
        if caller.terms.service_class != "batch":
            remedy += ', or ask for the `service_tier` "default"'
        raise BadSampling(f"`pace` must be 0 for batch requests, given: {wanted.tokens_per_s:g}; {remedy}")
    return replace(usual, tokens_per_s=0.0)

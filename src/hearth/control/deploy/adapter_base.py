"""Finds the deployed model that an adapter belongs to, and checks that it fits. Converts nothing."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from hearth.control.datadir import DataDir
from hearth.control.deploy.deploy import DeployOrder
from hearth.control.deploy.deployed import AdapterFacts, Deployed, DeployedAdapter
from hearth.control.deploy.names import Names, listed
from hearth.control.deploy.registry import Registry
from hearth.control.deploy.sources import PathSource, default_name
from hearth.core.errors import BadCheckpoint, RequestError
from hearth.core.sizes import computed_dtype
from hearth.store.format.adapter_manifest import AdapterManifest


def find_base(order: DeployOrder, trained_on: str | None, data_dir: DataDir) -> Deployed:
    """Return the base of an adapter: the one that was ordered, or the one it was trained on.

    `trained_on`: a path or a repository, from PEFT's config.

    Raises:
        RequestError: a dtype or quantisation is ordered, which are the base's, the base is an adapter, or the
            base is ambiguous.
        UnknownModel: the ordered base is not deployed.
    """
    if order.dtype != "auto" or order.quant not in ("auto", "none"):
        raise RequestError(
            "an adapter is stored as its base is computed; deploy it without `dtype` and `quant`, given: "
            f"{order.dtype}, {order.quant}"
        )
    with Registry(data_dir) as registry:
        models, adapters, presets = registry.all(), registry.adapters(), registry.presets()
    if order.base is not None:
        wanted = order.aliases.get(order.base, order.base)
        found = Names([*models, *adapters, *presets], {}).resolve(wanted)
        if isinstance(found, Deployed):
            return found
        what = "an adapter" if isinstance(found, DeployedAdapter) else "a preset"
        raise RequestError(
            f"`{order.base:.80}` is {what} itself, of `{found.base}`, and adapters are not stacked; "
            "name the model that this one was trained on"
        )
    meant = [model for model in models if trained_on is not None and _is_meant(model, trained_on, order)]
    if len(meant) == 1:
        return meant[0]
    which = "no deployed model is that" if not meant else f"that may be {listed([one.name for one in meant])}"
    what = f"of `{trained_on:.120}`, and {which}" if trained_on is not None else "that does not say of which"
    raise RequestError(
        f"`{order.source}` is an adapter {what}; name the deployed model "
        "with `--base NAME` (in a request `base`, or `base_model_name`)"
    )


def _is_meant(model: Deployed, trained_on: str, order: DeployOrder) -> bool:
    names = {trained_on}
    with suppress(RequestError):
        names.add(default_name(PathSource(Path(trained_on))))
    own = {model.name, *(alias for alias, name in order.aliases.items() if name == model.name)}
    return bool(names & own) or model.source.partition("@")[0] in (trained_on, f"hf:{trained_on}")


def check_fit(manifest: AdapterManifest, base: Deployed, kind: str, where: str) -> None:
    dtype = computed_dtype(base.facts.dtype, kind)
    if manifest.dimensions != base.facts.dimensions:
        raise BadCheckpoint(
            f"`{where}` was made for a model of other dimensions than `{base.name}`: {manifest.family} with "
            f"{manifest.dimensions.num_layers} layers of {manifest.dimensions.hidden_size}; choose that one"
        )
    if manifest.dtype != dtype:
        raise BadCheckpoint(
            f"`{where}` was made for {manifest.dtype}, and `{base.name}` is computed in {dtype}; deploy the "
            f"directory that PEFT wrote instead, or convert it with `--dtype {dtype}`"
        )


def adapter_facts_of(manifest: AdapterManifest) -> AdapterFacts:
    slices = [(target, part) for target in manifest.targets for part in target.slices]
    return AdapterFacts(
        num_bytes=manifest.layout.num_bytes,
        num_parameters=sum(part.rank * (target.num_inputs + part.size) for target, part in slices),
        dtype=manifest.dtype,
        max_rank=max(part.rank for _, part in slices),
        targets=tuple(dict.fromkeys(str(target.projection) for target in manifest.targets)),
        dimensions=manifest.dimensions,
    )

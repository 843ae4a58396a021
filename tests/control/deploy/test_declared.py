"""Models that the configuration declares, deployed by the real process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

from hearth.control.datadir import DataDir
from hearth.control.deploy.declared import DeclaredModels
from hearth.control.deploy.registry import Registry
from hearth.control.requests.caller import OPERATOR
from hearth.core.config import ModelConfig
from hearth.core.errors import ServiceError, UnknownModel
from tests.control.deploy.test_deployments import DeploymentsRig, made


def declared(data_dir: DataDir, sources: Mapping[str, str]) -> tuple[list[str], str | None, dict[str, str]]:
    """Start and end a service; returns the deployed models, the note and why requests for models fail."""
    configs = {name: ModelConfig(source=source) for name, source in sources.items()}

    async def run() -> tuple[list[str], str | None, dict[str, str]]:
        with closing(DeploymentsRig(data_dir, configs)) as rig:
            models = DeclaredModels(rig.deployments, configs)
            await models.deploy()
            refusals = {}
            for name in sources:
                try:
                    rig.deployments.find_for(name, OPERATOR)
                except ServiceError as error:
                    refusals[name] = str(error)
            return sorted(entry.name for entry in rig.deployments.entries()), models.note, refusals

    return asyncio.run(run())


@pytest.mark.e2e
def test_what_is_declared_is_deployed_once(
    data_dir: DataDir, converted: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    sources = {"one": str(converted), "two": str(converted)}
    assert declared(data_dir, sources) == (["one", "two"], None, {})
    assert any("model_deploying model=one phase=verifying" in line for line in caplog.messages)
    with Registry(data_dir) as registry:
        before = registry.all()
    assert declared(data_dir, sources) == (["one", "two"], None, {})
    with Registry(data_dir) as registry:
        assert registry.all() == before


@pytest.mark.e2e
def test_a_failure_is_named_and_the_others_are_served(data_dir: DataDir, converted: Path) -> None:
    missing = str(converted / "nowhere")
    models, note, refusals = declared(data_dir, {"bad": missing, "ftp": "ftp://x/y", "good": str(converted)})
    assert models == ["good"]
    assert note is not None
    assert "[models.bad] cannot be deployed: " in note
    assert missing in note
    assert set(refusals) == {"bad", "ftp"}
    assert refusals["ftp"].startswith(
        "`ftp` is not served yet: it could not be deployed: a model's URL begins"
    )


@pytest.mark.e2e
def test_another_source_replaces_what_has_the_name(
    data_dir: DataDir, converted: Path, checkpoint: Path
) -> None:
    made(data_dir, checkpoint, "one")
    assert declared(data_dir, {"one": str(converted)})[0] == ["one"]
    with Registry(data_dir) as registry:
        (model,) = registry.all()
    assert model.source == str(converted)


def test_until_it_is_deployed_a_declared_model_says_so_and_others_are_unknown(
    data_dir: DataDir, converted: Path
) -> None:
    configs = {"one": ModelConfig(source=str(converted))}
    with closing(DeploymentsRig(data_dir, configs)) as rig:
        DeclaredModels(rig.deployments, configs)
        with pytest.raises(ServiceError, match="`one` is not served yet: it waits to be deployed"):
            rig.deployments.find_for("one", OPERATOR)
        with pytest.raises(UnknownModel):
            rig.deployments.find_for("two", OPERATOR)

"""Deploying adapters: whose they are, what is refused, and what becomes of base and files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from hearth.control.datadir import DataDir
from hearth.control.deploy.deploy import DeployDone, DeployOrder, Task, _event_of, collect, register
from hearth.control.deploy.deployed import Deployed, DeployedAdapter
from hearth.control.deploy.deployer import _work, carry_out
from hearth.control.deploy.registry import Registry
from hearth.core.errors import BadCheckpoint, HasAdapters, NameTaken, RequestError, UnknownModel
from hearth.store.format.adapter_manifest import read_adapter_manifest
from hearth.store.format.manifest import WEIGHTS
from tests.store.format.peft_files import write_peft
from tests.store.stored import serving


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_peft(tmp_path_factory.mktemp("loras") / "My LoRA", targets=["q_proj", "down_proj"])


def deploy(data_dir: DataDir, source: Path | str, **wishes: object) -> DeployedAdapter:
    """And have it registered, as `hearth deploy` does."""
    order = replace(DeployOrder(str(source)), **wishes)  # type: ignore[arg-type] # fields of several types
    deployed = carry_out(order, data_dir, lambda *_: None)
    assert isinstance(deployed, DeployedAdapter)
    with Registry(data_dir) as registry:
        register(deployed, order.overwrite, registry, data_dir)
    return deployed


def test_an_adapter_is_converted_for_the_base_that_is_named(
    data_dir: DataDir, deployed: Deployed, lora: Path
) -> None:
    adapter = deploy(data_dir, lora, base="tiny")
    manifest = read_adapter_manifest(Path(adapter.directory))
    assert (adapter.name, adapter.base, adapter.source) == ("my-lora", "tiny", str(lora))
    assert adapter.adapter_id == manifest.digest
    assert adapter.num_bytes == manifest.layout.num_bytes
    assert adapter.facts.num_parameters == 3 * 4 * (64 + 64 + 112 + 64)
    assert (adapter.facts.max_rank, adapter.facts.targets) == (4, ("qkv", "down"))
    assert adapter.facts.dtype == manifest.dtype == "float32"  # as a CPU computes, though bfloat16 is stored
    assert adapter.fits(deployed.facts)


def test_on_a_gpu_an_adapter_has_the_dtype_of_its_base(
    data_dir: DataDir, deployed: Deployed, lora: Path
) -> None:
    assert deploy(data_dir, lora, base="tiny", kind="cuda").facts.dtype == deployed.facts.dtype == "bfloat16"


@pytest.mark.parametrize(
    "trained_on", ["tiny", "org/Tiny", "/home/me/checkpoints/Tiny/", "short-name", "meta/Original"]
)
def test_without_a_name_the_base_is_what_the_adapter_was_trained_on(
    data_dir: DataDir, deployed: Deployed, tmp_path: Path, trained_on: str
) -> None:
    with Registry(data_dir) as registry:
        registry.replace(replace(deployed, source="hf:meta/Original@main"))
        registry.add(replace(deployed, name="other"))
    lora = write_peft(tmp_path / "lora", targets=["q_proj"], config={"base_model_name_or_path": trained_on})
    assert deploy(data_dir, lora, aliases={"short-name": "tiny"}).base == "tiny"


@pytest.mark.parametrize(
    ("trained_on", "reason"),
    [
        ("org/Unknown", "an adapter of `org/Unknown`, and no deployed model is that; .*--base NAME"),
        (None, "an adapter that does not say of which; .*--base NAME"),
        ("meta/Original", "that may be other, tiny; .*--base NAME"),
    ],
)
def test_a_base_that_is_not_clear_is_asked_for(
    data_dir: DataDir, deployed: Deployed, tmp_path: Path, trained_on: str | None, reason: str
) -> None:
    with Registry(data_dir) as registry:
        registry.replace(replace(deployed, source="hf:meta/Original"))
        registry.add(replace(deployed, name="other", source="hf:meta/Original"))
    config = {"base_model_name_or_path": trained_on}
    lora = write_peft(tmp_path / "lora", targets=["q_proj"], config=config)
    with pytest.raises(RequestError, match=reason):
        deploy(data_dir, lora)


def test_what_no_adapter_can_have_is_refused(
    data_dir: DataDir, deployed: Deployed, lora: Path, checkpoint: Path, converted: Path
) -> None:
    before = set(data_dir.models_path.iterdir())
    with pytest.raises(UnknownModel, match="no model named `nobody`"):
        deploy(data_dir, lora, base="nobody")
    with pytest.raises(RequestError, match=r"without `dtype` and `quant`, given: auto, int8"):
        deploy(data_dir, lora, base="tiny", quant="int8")
    with pytest.raises(BadCheckpoint, match=r"no adapter_config\.json in"):
        deploy(data_dir, checkpoint, base="tiny", name="new")
    with pytest.raises(RequestError, match="is a model and no adapter; deploy it without a base"):
        deploy(data_dir, converted, base="tiny", name="new")
    for model in (checkpoint, converted):
        with pytest.raises((BadCheckpoint, RequestError), match=r"adapter"):
            deploy(data_dir, model, name="new", is_adapter=True)
    deploy(data_dir, lora, base="tiny", name="first")
    with pytest.raises(RequestError, match="`first` is an adapter itself, of `tiny`, and"):
        deploy(data_dir, lora, base="first", name="second")
    with pytest.raises(NameTaken):
        deploy(data_dir, lora, base="tiny", name="first")
    assert len(set(data_dir.models_path.iterdir()) - before) == 1


def test_a_converted_adapter_is_deployed_where_it_lies_if_it_fits(
    data_dir: DataDir, deployed: Deployed, lora: Path
) -> None:
    first = deploy(data_dir, lora, base="tiny", name="first")
    again = deploy(data_dir, first.directory, base="tiny", name="again")
    assert (again.where, again.digest) == (first.where, first.digest)
    with serving(Path(first.directory)) as server:
        far = deploy(data_dir, f"{server.url}/tiny", base="tiny", name="far")
        assert far.where == f"{server.url}/tiny@{first.digest}"
        assert not (Path(far.directory) / WEIGHTS).exists()
    with pytest.raises(RequestError, match="--base"):
        deploy(data_dir, first.directory, name="whose")
    with pytest.raises(
        BadCheckpoint, match=r"made for float32, and `tiny` is computed in bfloat16; .* `--dtype bfloat16`"
    ):
        deploy(data_dir, first.directory, base="tiny", kind="cuda", name="gpu")
    wider = replace(deployed.facts, dimensions=replace(deployed.facts.dimensions, vocab_size=1))
    with Registry(data_dir) as registry:
        registry.add(replace(deployed, name="wider", facts=wider))
    with pytest.raises(BadCheckpoint, match="other dimensions than `wider`: llama with 3 layers of 64"):
        deploy(data_dir, first.directory, base="wider", name="wide")


def test_the_files_of_an_adapter_stay_until_it_is_replaced(
    data_dir: DataDir, deployed: Deployed, lora: Path
) -> None:
    first = deploy(data_dir, lora, base="tiny")
    with Registry(data_dir) as registry:
        collect(data_dir, registry)
    assert Path(first.directory).is_dir()
    second = deploy(data_dir, lora, base="tiny", overwrite=True)
    assert not Path(first.directory).exists()
    assert Path(second.directory).is_dir()


def test_a_base_with_adapters_is_replaced_only_by_what_they_fit(
    data_dir: DataDir, deployed: Deployed, lora: Path
) -> None:
    deploy(data_dir, lora, base="tiny")
    narrow = replace(deployed.facts, dimensions=replace(deployed.facts.dimensions, num_layers=2))
    with Registry(data_dir) as registry:
        with pytest.raises(HasAdapters, match="would not fit what is to replace it: my-lora"):
            register(replace(deployed, facts=narrow), True, registry, data_dir)
        register(replace(deployed, facts=replace(deployed.facts, quant="fp8")), True, registry, data_dir)


def test_the_process_that_deploys_returns_an_adapter(
    data_dir: DataDir, deployed: Deployed, lora: Path
) -> None:
    class Lines:
        """What the process writes to its standard output."""

        last = b""

        def progress(self, phase: str, done_bytes: int, total_bytes: int) -> None:
            self.write(event="progress", phase=phase, done_bytes=done_bytes, total_bytes=total_bytes)

        def write(self, **fields: object) -> None:
            self.last = msgspec.json.encode(fields)

    lines = Lines()
    order = DeployOrder(str(lora), base="t", aliases={"t": "tiny"})
    assert _work(Task(order, str(data_dir.path)), lines) == 0  # type: ignore[arg-type] # writes elsewhere
    done = _event_of(lines.last)
    assert isinstance(done, DeployDone)
    assert isinstance(done.deployed, DeployedAdapter)
    assert (done.deployed.name, done.deployed.base) == ("my-lora", "tiny")

from __future__ import annotations

import difflib
import os
import pickle
import re
import sqlite3
import subprocess
import sys
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.failing_disk import failing_writes
from hearth.control.datadir import DataDir
from hearth.control.deploy.deployed import AdapterFacts, Deployed, DeployedAdapter
from hearth.control.deploy.names import MAX_COMPARED, Names, check_name, file_name
from hearth.control.deploy.registry import Registry
from hearth.core.config import ModelConfig
from hearth.core.errors import (
    ConfigError,
    DataDirError,
    HasAdapters,
    NameTaken,
    RequestError,
    StoreError,
    UnknownModel,
)
from hearth.policy.memory.space_slots import NUM_SLOTS
from hearth.snapshot.directory import SnapshotDirectory
from tests.policy.fleet.test_footprint import LARGE
from tests.snapshot.fingerprints import FINGERPRINT

TINY = Deployed("tiny", "/source", "/models/tiny", "/models/tiny", "0" * 32, LARGE, 1.5)
OTHER = replace(TINY, name="Other-1.0", source="hf:org/other")
#: What was stored before facts had dimensions: nothing tells how large the workspace of such a model is now.
EARLIER_FACTS = """
{"num_bytes": 4096, "wide_bytes": 4096, "dtype": "float32", "quant": "none", "num_parameters": 9,
"num_layers": 3, "num_kv_heads": 2, "head_dim": 16, "vocab_size": 160, "max_positions": 128,
"token_width": 880, "sample_width": 416, "split_width": 36, "rope_dim": 16, "eos_ids": [1],
"has_chat_template": true, "largest_bytes": 1024}
"""

#: Adds models until it is killed, and says which are in.
WRITER = """
import pickle, sys
from dataclasses import replace
from hearth.control.datadir import DataDir
from hearth.control.deploy.registry import Registry
registry, tiny = Registry(DataDir.open(sys.argv[1])), pickle.loads(bytes.fromhex(sys.argv[2]))
for number in range(1_000_000):
    registry.replace(replace(tiny, name=f"model-{number}", source="x" * 5000))
    print(number, flush=True)
"""


@pytest.fixture
def data_dir(tmp_path: Path) -> DataDir:
    return DataDir.open(tmp_path)


def test_what_was_added_is_there_when_it_is_opened_again(data_dir: DataDir) -> None:
    with Registry(data_dir) as registry:
        registry.add(TINY)
        registry.add(OTHER)
    with Registry(data_dir) as registry:
        assert registry.location("tiny") == TINY.location
        assert registry.location("nobody") is None
        assert registry.all() == [OTHER, TINY]


def test_a_name_is_taken_once_and_can_be_replaced(data_dir: DataDir) -> None:
    with Registry(data_dir) as registry:
        registry.add(TINY)
        with pytest.raises(NameTaken, match="deployed as `tiny` already; choose another name, or replace"):
            registry.add(replace(TINY, source="elsewhere"))
        assert registry.all() == [TINY]
        registry.replace(replace(TINY, source="elsewhere"))
        assert registry.all() == [replace(TINY, source="elsewhere")]


def hexadecimal(number: int) -> str:
    return f"{number:064x}"


def test_each_model_has_a_slot_of_its_own_for_as_long_as_it_is_the_same(data_dir: DataDir) -> None:
    """By their digests all three would have one."""
    models = [replace(TINY, name=f"m{at}", digest=hexadecimal(7 + at * NUM_SLOTS)) for at in range(3)]
    with Registry(data_dir) as registry:
        for model in models:
            registry.add(model)
        assert registry.space_slots() == {"m0": 7, "m1": 8, "m2": 9}
        registry.remove("m0")
        registry.replace(replace(models[2], source="elsewhere"))
    with Registry(data_dir) as registry:
        assert registry.space_slots() == {"m1": 8, "m2": 9}
        registry.replace(replace(models[1], digest=hexadecimal(90)))
        registry.replace(replace(models[2], digest=hexadecimal(9 + NUM_SLOTS)))
        assert registry.space_slots() == {"m1": 90, "m2": 9}


def test_a_model_gets_the_slot_that_a_snapshot_of_it_was_made_for(data_dir: DataDir) -> None:
    """Unless another has it by now, or the file is damaged: its digest decides then."""
    digest = hexadecimal(3)
    fingerprint = replace(FINGERPRINT, manifest=digest, addresses="slot=5 weights=0x18000000000")
    kept = SnapshotDirectory.open(data_dir.snapshots_path, 1 << 20).save(fingerprint, {"section": b"1"})
    with Registry(data_dir) as registry:
        registry.add(replace(TINY, digest=digest))
        registry.add(replace(TINY, name="twin", digest=digest))
        assert registry.space_slots() == {"tiny": 5, "twin": 3}
        registry.remove("tiny")
        kept.write_bytes(kept.read_bytes()[:-1])
        registry.add(replace(TINY, digest=digest))
        assert registry.space_slots() == {"tiny": 4, "twin": 3}


def test_models_that_were_deployed_when_there_were_no_slots_get_theirs(data_dir: DataDir) -> None:
    with Registry(data_dir) as registry:
        registry.add(TINY)
        registry.add(replace(OTHER, digest=hexadecimal(3)))
    connection = sqlite3.connect(data_dir.registry_path)
    connection.execute("drop table space_slots")
    connection.commit()
    connection.close()
    with Registry(data_dir) as registry:
        assert registry.space_slots() == {"tiny": 0, "Other-1.0": 3}


def test_labels_are_kept_and_a_registry_without_them_gets_them(data_dir: DataDir) -> None:
    labelled = replace(OTHER, labels=("zone=a", "disk=ssd"))
    with Registry(data_dir) as registry:
        registry.add(TINY)
    with closing(sqlite3.connect(data_dir.registry_path)) as connection:
        connection.execute("alter table models drop column labels")
        connection.commit()
    with Registry(data_dir) as registry:
        registry.add(labelled)
        assert registry.all() == [labelled, TINY]


def test_models_beyond_all_slots_have_none(data_dir: DataDir) -> None:
    with Registry(data_dir) as registry:
        with registry.transaction():
            for number in range(NUM_SLOTS + 2):
                registry.add(replace(TINY, name=f"m{number:03}"))
        slots = registry.space_slots()
        assert sorted(slots.values()) == list(range(NUM_SLOTS))
        registry.remove("m000")
        assert registry.space_slots()[f"m{NUM_SLOTS}"] == slots["m000"]


def test_a_model_whose_slot_is_none_any_more_gets_another(data_dir: DataDir) -> None:
    with Registry(data_dir) as registry:
        registry.add(replace(TINY, digest=hexadecimal(7)))
        registry.add(replace(OTHER, digest=hexadecimal(3)))
    connection = sqlite3.connect(data_dir.registry_path)
    connection.execute("update space_slots set slot = ? where name = 'tiny'", [NUM_SLOTS])
    connection.commit()
    connection.close()
    with Registry(data_dir) as registry:
        assert registry.space_slots() == {"tiny": 7, "Other-1.0": 3}


def test_a_removed_model_is_returned_and_gone(data_dir: DataDir) -> None:
    with Registry(data_dir) as registry:
        registry.add(TINY)
        assert registry.remove("tiny") == [TINY.location]
        with pytest.raises(UnknownModel, match="no model named `tiny`"):
            registry.remove("tiny")


def test_two_processes_see_each_others_models(data_dir: DataDir) -> None:
    with Registry(data_dir) as service, Registry(data_dir) as cli:
        cli.add(TINY)
        assert service.all() == [TINY]
        service.remove("tiny")
        assert cli.all() == []


def test_a_writer_that_is_killed_leaves_every_model_it_has_told_of(data_dir: DataDir) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(data_dir.path), pickle.dumps(TINY).hex()],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    ) as writer:
        assert writer.stdout is not None
        told = [int(writer.stdout.readline()) for _ in range(50)][-1]
        writer.kill()
    with Registry(data_dir) as registry:
        names = {model.name for model in registry.all()}
    assert {f"model-{number}" for number in range(told + 1)} <= names
    connection = sqlite3.connect(data_dir.registry_path)
    assert connection.execute("pragma integrity_check").fetchall() == [("ok",)]
    connection.close()


def test_a_file_that_is_no_registry_is_refused(data_dir: DataDir) -> None:
    data_dir.registry_path.write_bytes(b"no database" * 1000)
    with pytest.raises(DataDirError, match=r"registry.db` cannot be used: file is not a database; check"):
        Registry(data_dir)


@pytest.mark.parametrize("facts", ["{}", EARLIER_FACTS])
def test_a_row_that_cannot_be_read_hides_no_other_and_can_go(
    data_dir: DataDir, caplog: pytest.LogCaptureFixture, facts: str
) -> None:
    with Registry(data_dir) as registry:
        registry.add(TINY)
        registry.add(OTHER)
        connection = sqlite3.connect(data_dir.registry_path)
        connection.execute("update models set facts = ? where name = 'tiny'", (facts,))
        connection.commit()
        connection.close()
        assert registry.all() == [OTHER]
        assert re.search(r"row_skipped .*facts of `tiny` that cannot be read: .*; deploy it", caplog.text)
        assert registry.location("tiny") == TINY.location
        assert registry.locations() == [OTHER.location, TINY.location]
        assert registry.remove("tiny") == [TINY.location]
        assert registry.locations() == [OTHER.location]


def test_a_model_that_was_deployed_when_families_were_not_kept_is_served_all_the_same(
    data_dir: DataDir,
) -> None:
    with Registry(data_dir) as registry:
        registry.add(TINY)
        with closing(sqlite3.connect(data_dir.registry_path)) as connection:
            connection.execute("update models set facts = json_remove(facts, '$.family')")
            connection.commit()
        assert registry.all() == [replace(TINY, facts=replace(LARGE, family=None))] != [TINY]


def test_what_is_done_in_a_transaction_is_undone_if_it_fails(data_dir: DataDir) -> None:
    with Registry(data_dir) as registry, Registry(data_dir) as other:
        registry.add(TINY)
        with suppress(ConfigError), registry.transaction():
            registry.replace(replace(TINY, source="elsewhere"))
            assert registry.all() == [replace(TINY, source="elsewhere")]
            assert other.all() == [TINY]
            raise ConfigError("no")
        assert registry.all() == [TINY]


def test_a_registry_that_another_keeps_busy_is_told(data_dir: DataDir) -> None:
    with Registry(data_dir) as busy, Registry(data_dir, wait_s=0.0) as registry, busy.transaction():
        assert registry.all() == [], "who only reads waits for nobody"
        with pytest.raises(DataDirError, match=r"another process keeps `.*registry.db` busy; try again"):
            registry.add(TINY)


def test_a_disk_that_fails_writes_is_told_and_works_again_when_it_does(data_dir: DataDir) -> None:
    with Registry(data_dir) as registry:
        with (
            failing_writes([os.getpid()]),
            pytest.raises(StoreError, match=r"`.*registry.db` .*: room, quotas"),
        ):
            registry.add(TINY)
        assert registry.all() == []
        registry.add(TINY)
        assert registry.all() == [TINY]


def test_a_change_by_another_is_noticed_once(data_dir: DataDir) -> None:
    with Registry(data_dir) as registry, Registry(data_dir) as other:
        registry.has_changed()
        registry.add(TINY)
        assert not registry.has_changed(), "its own changes are known"
        other.add(OTHER)
        assert registry.has_changed()
        assert not registry.has_changed()


@pytest.mark.parametrize(
    "name", ["a", "A", "0", "qwen2.5-7b", "a_b", "x" * 128, "a.", "a-", "org/a", "a:7b", "hf.co/org/a:q4"]
)
def test_a_name_is_letters_digits_and_a_few_signs_in_parts_as_hubs_have_them(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        ".a",
        "-a",
        "a..b",
        "a\\b",
        "a b",
        "a\n",
        "é",
        "x" * 129,
        "a\0",
        "../../etc",
        "/a",
        "a/",
        "a//b",
        "a/./b",
        "a/../b",
        "a/.b",
        "a:",
        ":a",
        "a::b",
        "hf:org/a",
        "s3://bucket/a",
        "a%2Fb",
    ],
)
def test_what_could_lead_elsewhere_is_no_name(name: str, data_dir: DataDir) -> None:
    with pytest.raises(RequestError, match="a name is 1 to 128 letters"):
        check_name(name)
    with Registry(data_dir) as registry, pytest.raises(RequestError):
        registry.add(replace(TINY, name=name))


@given(st.text() | st.text(alphabet="ab0./:-_"))
def test_a_file_of_any_accepted_name_lies_in_its_directory(name: str) -> None:
    try:
        path = Path("/data/models") / file_name(name)
    except RequestError:
        return
    assert path.resolve().parent == Path("/data/models")


def test_a_tag_that_says_latest_may_be_there_or_be_left_out() -> None:
    tagged = replace(OTHER, name="org/other:latest")
    names = Names([TINY, tagged], {"tiny": ModelConfig(aliases=("t",))})

    assert [names.resolve(name) for name in ("tiny:latest", "t:latest")] == [TINY] * 2
    assert names.resolve("org/other") == tagged
    assert names.resolve("tiny:latest", ["t"]) == TINY
    assert names.allowed(["tiny:latest", "org/other"]) == {"tiny", "org/other:latest"}
    for name in ("tiny:7b", "tiny:latest:latest", ":latest"):
        with pytest.raises(UnknownModel):
            names.resolve(name)


def test_names_and_aliases_lead_to_the_model() -> None:
    names = Names([TINY, OTHER], {"tiny": ModelConfig(aliases=("gpt-4", "org/tiny"))})
    assert [names.resolve(name) for name in ("tiny", "gpt-4", "org/tiny")] == [TINY] * 3
    assert names.resolve("Other-1.0") == OTHER


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ({"tiny": ("Other-1.0",)}, "the alias `Other-1.0` of model `tiny` means model `Other-1.0` too"),
        ({"tiny": ("a",), "Other-1.0": ("a",)}, "the alias `a` of model `Other-1.0` means model `tiny` too"),
        ({"absent": ("tiny",)}, "the alias `tiny` of model `absent` means model `tiny` too"),
        ({"tiny": ("t",), "t": ()}, "the alias `t` of model `tiny` means model `t` too"),
    ],
)
def test_an_alias_that_means_two_models_is_refused(configs: dict[str, tuple[str, ...]], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Names([TINY, OTHER], {name: ModelConfig(aliases=aliases) for name, aliases in configs.items()})
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["org//tiny", "a..b", "", "x" * 129])
def test_settings_that_no_model_can_have_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"invalid settings in \[models\."):
        Names([TINY], {name: ModelConfig()})


def test_settings_wait_for_a_model_that_is_not_deployed_and_say_so() -> None:
    names = Names([TINY], {"tiny": ModelConfig(), "tinny": ModelConfig(), "other": ModelConfig()})

    assert names.waiting() == {"tinny": "did you mean `tiny`?", "other": "deployed: tiny"}


def test_an_alias_that_repeats_itself_or_its_model_does_no_harm() -> None:
    names = Names([TINY], {"tiny": ModelConfig(aliases=("tiny", "t", "t"))})
    assert names.resolve("t") == TINY


def test_a_table_for_a_model_that_is_not_deployed_waits() -> None:
    names = Names([TINY], {"later": ModelConfig(aliases=("soon",))})
    with pytest.raises(UnknownModel, match="no model named `soon`"):
        names.resolve("soon")


@pytest.mark.parametrize(
    ("deployed", "name", "hint"),
    [
        (
            [],
            "tiny",
            "nothing is deployed yet; deploy a directory, GGUF file or hf:ORG/NAME by `hearth deploy`",
        ),
        ([TINY], "tini", "did you mean `tiny`?"),
        ([TINY, OTHER], "zzz", "deployed: Other-1.0, tiny"),
        (
            [replace(TINY, name=f"m{i}") for i in range(20)],
            "zzz",
            "deployed: m0, m1, m10, m11, m12, m13, m14, m15, m16, m17, ...",
        ),
    ],
)
def test_an_unknown_name_is_answered_with_what_there_is(
    deployed: list[Deployed], name: str, hint: str
) -> None:
    with pytest.raises(UnknownModel) as caught:
        Names(deployed, {}).resolve(name)
    assert str(caught.value) == f"no model named `{name}`; {hint}"


def test_the_nearest_of_thousands_of_names_is_found_without_comparing_with_each() -> None:
    names = Names(
        [replace(TINY, name=f"org-{kind}-{i:04d}") for i in range(700) for kind in ("llama", "qwen", "phi")],
        {},
    )
    num_compared = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal num_compared
        is_comparison = frame.f_code is difflib.SequenceMatcher.real_quick_ratio.__code__
        num_compared += event == "call" and is_comparison

    sys.setprofile(count)
    try:
        error = names.unknown("org-lama-0420")
    finally:
        sys.setprofile(None)
    assert str(error).endswith("did you mean `org-llama-0420`?")
    assert 0 < num_compared <= MAX_COMPARED


def test_who_may_know_of_some_models_is_told_of_no_other() -> None:
    names = Names([TINY, OTHER], {"tiny": ModelConfig(aliases=("gpt-4",))})
    for name in ("tiny", "gpt-4"):
        assert names.resolve(name, ["gpt-4"]) is TINY
    told = set()
    for hidden in ("Other-1.0", "Other-1.1"):  # there, and not there
        with pytest.raises(UnknownModel) as refused:
            names.resolve(hidden, ["tiny", "not-deployed"])
        told.add(str(refused.value).replace(hidden, "NAME"))
    assert told == {"no model named `NAME`; deployed: gpt-4, tiny"}
    assert names.allowed(["gpt-4", "not-deployed"]) == {"tiny"}


ADAPTER = DeployedAdapter(
    "shop",
    "tiny",
    "/lora",
    "/models/shop",
    "/models/shop",
    "1" * 32,
    AdapterFacts(4096, 64, LARGE.dtype, 8, ("qkv",), LARGE.dimensions),
    created_at_s=2.5,
)


def test_an_adapter_is_kept_beside_its_base_and_apart_from_models(data_dir: DataDir) -> None:
    with Registry(data_dir) as registry:
        registry.add(TINY)
        registry.add(ADAPTER)
    with Registry(data_dir) as registry:
        assert registry.all() == [TINY]
        assert registry.adapters() == [ADAPTER]
        assert registry.location("shop") == ADAPTER.location
        assert set(registry.locations()) == {TINY.location, ADAPTER.location}


def test_models_and_adapters_share_their_names(data_dir: DataDir) -> None:
    with Registry(data_dir) as registry:
        registry.add(TINY)
        registry.add(ADAPTER)
        with pytest.raises(NameTaken, match="`shop`"):
            registry.add(replace(TINY, name="shop"))
        with pytest.raises(NameTaken, match="`shop`"):
            registry.add(ADAPTER)
        registry.replace(replace(TINY, name="shop"))
        assert registry.adapters() == []


def test_an_adapter_replaces_an_adapter_and_no_model(data_dir: DataDir) -> None:
    with Registry(data_dir) as registry:
        registry.add(TINY)
        registry.add(OTHER)
        registry.add(ADAPTER)
        registry.replace(replace(ADAPTER, source="elsewhere"))
        with pytest.raises(
            RequestError, match=r"`Other-1\.0` is the name of a model, which no adapter replaces"
        ):
            registry.replace(replace(ADAPTER, name="Other-1.0"))
        assert registry.all() == [OTHER, TINY]
        assert registry.adapters() == [replace(ADAPTER, source="elsewhere")]


@pytest.mark.parametrize("base", ["nobody", "other-lora"])
def test_an_adapter_needs_a_model_that_is_deployed(data_dir: DataDir, base: str) -> None:
    with Registry(data_dir) as registry:
        registry.add(TINY)
        registry.add(replace(ADAPTER, name="other-lora"))
        with pytest.raises(UnknownModel, match=f"no model that is deployed: `{base}`; .*--base"):
            registry.add(replace(ADAPTER, base=base))


def test_a_base_goes_with_its_adapters_or_not_at_all(data_dir: DataDir) -> None:
    with Registry(data_dir) as registry:
        registry.add(TINY)
        registry.add(ADAPTER)
        with pytest.raises(HasAdapters, match=r"`tiny` has adapters.*shop; .*--with-adapters"):
            registry.remove("tiny")
        assert registry.all() == [TINY]
        assert registry.remove("tiny", with_adapters=True) == [TINY.location, ADAPTER.location]
        assert registry.locations() == []


def test_an_adapter_is_removed_alone(data_dir: DataDir) -> None:
    with Registry(data_dir) as registry:
        registry.add(TINY)
        registry.add(ADAPTER)
        assert registry.remove("shop") == [ADAPTER.location]
        assert registry.all() == [TINY]


def test_no_base_goes_while_an_adapter_of_it_is_registered(
    data_dir: DataDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes deploy and remove at once: one of them waits, and sees what the other has done."""
    put, refused = Registry._put, list[DataDirError]()

    def put_late(registry: Registry, verb: str, deployed: Deployed | DeployedAdapter) -> None:
        if isinstance(deployed, DeployedAdapter):
            with pytest.raises(DataDirError, match="busy") as busy, Registry(data_dir, 0.0) as other:
                other.remove("tiny")
            refused.append(busy.value)
        put(registry, verb, deployed)

    with Registry(data_dir) as registry:
        registry.add(TINY)
        monkeypatch.setattr(Registry, "_put", put_late)
        registry.add(ADAPTER)
        assert (registry.all(), registry.adapters(), len(refused)) == ([TINY], [ADAPTER], 1)


def test_a_base_is_replaced_only_by_what_its_adapters_fit(data_dir: DataDir) -> None:
    wider = replace(LARGE, dimensions=replace(LARGE.dimensions, hidden_size=1))
    with Registry(data_dir) as registry:
        registry.add(TINY)
        registry.add(ADAPTER)
        registry.replace(replace(TINY, source="elsewhere", facts=replace(LARGE, quant="int8")))
        with pytest.raises(HasAdapters, match="shop"):
            registry.replace(replace(TINY, facts=wider))
        with pytest.raises(RequestError, match="needs a name of its own, and `tiny` is its base") as refused:
            registry.replace(replace(ADAPTER, name="tiny", base="tiny"))
        assert refused.value.http_status == 400, "nothing is missing"

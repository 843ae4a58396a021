from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hearth.control.datadir import DataDir
from hearth.control.deploy.preset import Preset
from hearth.control.deploy.registry import Registry
from hearth.core.errors import (
    BadSampling,
    BadTokenizer,
    HasAdapters,
    HearthError,
    NameTaken,
    RequestError,
    UnknownModel,
)
from hearth.core.types import SamplingParams
from tests.control.deploy.test_registry import OTHER, TINY

HI = {"role": "user", "content": "Hi"}


def test_parameters_of_a_request_go_before_those_of_the_preset_before_the_usual_ones() -> None:
    preset = Preset(temperature=0.25, stop=("Ahoy",))
    params = preset.params(SamplingParams(temperature=0.7, max_tokens=100), max_tokens=5, temperature=None)
    assert params == SamplingParams(temperature=0.25, max_tokens=5, stop=("Ahoy",))


def test_a_conversation_begins_with_the_system_prompt_unless_it_has_one() -> None:
    own = [{"role": "system", "content": "Be brief."}, HI]
    assert Preset(system="Arr.").begun([HI]) == [{"role": "system", "content": "Arr."}, HI]
    assert Preset(system="Arr.").begun(own) == own
    assert Preset().begun([HI]) == [HI]


def test_a_preset_over_another_keeps_what_it_does_not_set() -> None:
    assert Preset(temperature=0.5).over(Preset(system="Arr.", temperature=0.1)) == Preset(
        "Arr.", temperature=0.5
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ .System }} {{ .Prompt }}", "not Go as Ollama's"),
        ("{{- if .System }}{{ .System }}{{ end }}", "not Go as Ollama's"),
        ("{% for %}", "does not compile"),
    ],
)
def test_a_template_that_is_not_jinja_is_refused(template: str, message: str) -> None:
    with pytest.raises((RequestError, BadTokenizer), match=message):
        Preset(template=template).check()
    Preset(template="{{ messages[0].content }} {{ 1.5 }}").check()


def test_a_parameter_out_of_its_range_is_refused() -> None:
    with pytest.raises(BadSampling, match="`top_p` must be above 0"):
        Preset(top_p=0.0)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with Registry(DataDir.open(tmp_path)) as registry:
        registry.add(TINY)
        yield registry


def test_a_preset_is_kept_and_replaced_and_one_of_a_preset_has_the_same_base(tmp_path: Path) -> None:
    with Registry(DataDir.open(tmp_path)) as registry:
        registry.add(TINY)
        registry.put_preset("pirate", "tiny", Preset(system="Ahoy."), 1.0)
        registry.put_preset("pirate", "tiny", Preset(system="Arr.", top_k=3), 2.0)
        registry.put_preset("mild", "pirate", Preset(temperature=0.1), 3.0)
    with Registry(DataDir.open(tmp_path)) as registry:
        mild, pirate = registry.presets()
    assert (pirate.base, pirate.preset, pirate.created_at_s) == ("tiny", Preset(system="Arr.", top_k=3), 2.0)
    assert (mild.base, mild.preset) == ("tiny", Preset(system="Arr.", top_k=3, temperature=0.1))


@pytest.mark.parametrize(
    ("name", "base", "error"),
    [("tiny", "tiny", NameTaken), ("new", "absent", UnknownModel), ("hf:new", "tiny", RequestError)],
)
def test_a_preset_needs_a_name_of_its_own_and_a_base(
    registry: Registry, name: str, base: str, error: type[HearthError]
) -> None:
    with pytest.raises(error):
        registry.put_preset(name, base, Preset(), 1.0)
    assert registry.presets() == []


def test_a_base_goes_only_with_its_presets(registry: Registry) -> None:
    registry.put_preset("pirate", "tiny", Preset(), 1.0)
    with pytest.raises(HasAdapters, match="has presets, which are nothing without it: pirate"):
        registry.remove("tiny")
    assert registry.remove("tiny", with_adapters=True) == [TINY.location]
    assert registry.presets() == []


def test_a_preset_goes_without_its_base(registry: Registry) -> None:
    registry.put_preset("pirate", "tiny", Preset(), 1.0)
    assert registry.remove("pirate") == []
    assert registry.all() == [TINY]


def test_a_model_takes_the_name_of_a_preset_only_by_order(registry: Registry) -> None:
    registry.put_preset(OTHER.name, "tiny", Preset(), 1.0)
    with pytest.raises(NameTaken):
        registry.add(OTHER)
    registry.replace(OTHER)
    assert (registry.presets(), len(registry.all())) == ([], 2)

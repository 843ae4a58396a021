from __future__ import annotations

import asyncio
import logging
import stat
from pathlib import Path

import pytest

from hearth.control.keys import key_usage, keys
from hearth.control.keys.key_usage import KeyUsage, KeyUse, read_usage
from hearth.control.keys.keys import ApiKeys
from hearth.control.observe.metrics import MAX_KEY_LABELS, OTHER_KEYS, Metrics
from hearth.control.requests.caller import ANYBODY, Caller, KeyTerms


def caller_of(path: Path, name: str) -> Caller:
    """Make a key, and return who has it."""
    caller = ApiKeys.load(path).check(keys.add(path, name, "user", terms=KeyTerms()).key)
    assert caller is not None
    return caller


def counted(usage_path: Path, known: ApiKeys, *uses: tuple[Caller, int, int]) -> Metrics:
    """One life of a service in which requests end."""

    async def live() -> Metrics:
        metrics = Metrics()
        usage = KeyUsage(usage_path, known.ids, metrics)
        for caller, prompt_tokens, output_tokens in uses:
            usage.count(caller, prompt_tokens, output_tokens)
        await usage.close()
        assert (usage.note is None) == usage_path.exists()
        return metrics

    return asyncio.run(live())


def test_use_is_counted_over_restarts(tmp_path: Path) -> None:
    path, usage_path = tmp_path / "keys.json", tmp_path / "usage.json"
    ada, bob = caller_of(path, "ada"), caller_of(path, "bob")
    known = ApiKeys.load(path)
    counted(usage_path, known, (ada, 5, 2), (bob, 1, 1), (ANYBODY, 9, 9))
    since_s = read_usage(usage_path).since_s
    counted(usage_path, known, (ada, 10, 4))

    record = read_usage(usage_path)
    assert record.since_s == since_s
    assert {ada.key_id, bob.key_id} == record.keys.keys()
    assert ada.key_id is not None
    use = record.keys[ada.key_id]
    assert (use.num_requests, use.prompt_tokens, use.output_tokens) == (2, 15, 6)
    assert use.last_used_at_s is not None
    assert stat.S_IMODE(usage_path.stat().st_mode) == 0o600


def test_a_removed_key_is_forgotten_and_a_new_one_of_its_name_begins_anew(tmp_path: Path) -> None:
    path, usage_path = tmp_path / "keys.json", tmp_path / "usage.json"
    before = caller_of(path, "ada")
    counted(usage_path, ApiKeys.load(path), (before, 5, 2))
    keys.remove(path, "ada")
    after = caller_of(path, "ada")
    counted(usage_path, ApiKeys.load(path), (after, 1, 1))
    assert read_usage(usage_path).keys.keys() == {after.key_id}


def test_changes_are_written_after_a_while_and_all_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_usage, "WRITE_S", 0.01)
    path, usage_path = tmp_path / "keys.json", tmp_path / "usage.json"
    ada = caller_of(path, "ada")

    async def live() -> None:
        usage = KeyUsage(usage_path, ApiKeys.load(path).ids, Metrics())
        for _ in range(3):
            usage.count(ada, 1, 1)
        assert not usage_path.exists()
        while not usage_path.exists():
            await asyncio.sleep(0.01)
        assert [use.num_requests for use in read_usage(usage_path).keys.values()] == [3]
        await usage.close()

    asyncio.run(live())


def test_a_file_that_cannot_be_read_is_begun_anew_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, usage_path = tmp_path / "keys.json", tmp_path / "usage.json"
    ada = caller_of(path, "ada")
    usage_path.write_text("{")
    metrics = counted(usage_path, ApiKeys.load(path), (ada, 1, 1))
    assert metrics.registry.get_sample_value("hearth_fallbacks_total", {"what": "key_usage_lost"}) == 1
    assert "key_usage_begun_anew" in caplog.text
    assert len(read_usage(usage_path).keys) == 1


def test_a_disk_that_fails_is_told_once_and_nothing_else_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.json"
    ada = caller_of(path, "ada")
    with caplog.at_level(logging.ERROR):
        metrics = counted(tmp_path / "nowhere" / "usage.json", ApiKeys.load(path), (ada, 1, 1))
    assert caplog.text.count("key_usage_unwritten") == 1
    assert metrics.registry.get_sample_value("hearth_fallbacks_total", {"what": "key_usage_unwritten"}) == 1


def test_metrics_count_by_name_as_long_as_there_are_few(tmp_path: Path) -> None:
    callers = [Caller(f"k{number}", "user", ANYBODY.group, key_id=f"{number}") for number in range(70)]  # type: ignore[arg-type] # ids are texts
    known = ApiKeys(tmp_path / "keys.json")
    metrics = counted(tmp_path / "usage.json", known, *((caller, 3, 2) for caller in callers))
    value = metrics.registry.get_sample_value
    assert value("hearth_key_requests_total", {"key": "k0"}) == 1
    assert value("hearth_key_prompt_tokens_total", {"key": "k0"}) == 3
    assert value("hearth_key_output_tokens_total", {"key": "k0"}) == 2
    assert value("hearth_key_requests_total", {"key": OTHER_KEYS}) == 70 - MAX_KEY_LABELS
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    assert sum(sample.name == "hearth_key_requests_total" for sample in samples) == MAX_KEY_LABELS + 1
    assert KeyUse().last_used_at_s is None

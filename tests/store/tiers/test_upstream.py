"""Versions of what models are deployed from: their addresses, what is noted of them, how they are seen."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from bench.bad_server import BadServer, says
from hearth.core.errors import BadCheckpoint, ChunkMissing, StoreError, Unreachable
from hearth.store.keeper_client import KeeperClient
from hearth.store.tiers.upstream import (
    UPSTREAM,
    Change,
    RemoteAddress,
    Upstream,
    note_version,
    parse_address,
    read_upstream,
    version_now,
    write_upstream,
)
from hearth.store.transfer.lease_server import LeaseServer
from tests.store.stored import serving, stored_at, tiers_at, write_model

DIGEST = "0123456789abcdef" * 2


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_model(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def server(source: Path) -> Iterator[BadServer]:
    with serving(source) as server:
        yield server


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("s3://bucket/m", RemoteAddress("s3://bucket/m")),
        ("s3://bucket/m/", RemoteAddress("s3://bucket/m")),
        (f"s3://bucket/m@{DIGEST}", RemoteAddress("s3://bucket/m", DIGEST)),
        (f"https://host/@org/m@{DIGEST}/", RemoteAddress("https://host/@org/m", DIGEST)),
        ("https://host/m@v1", RemoteAddress("https://host/m@v1")),
        (f"https://host/{DIGEST}", RemoteAddress(f"https://host/{DIGEST}")),
    ],
)
def test_an_address_may_name_a_version(text: str, address: RemoteAddress) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


def test_a_change_is_noted_once_and_gone_when_the_version_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_upstream(tmp_path, Upstream("v1"))
    assert note_version(tmp_path, "v1") == Upstream("v1")
    with caplog.at_level(logging.WARNING):
        first, second = note_version(tmp_path, "v2"), note_version(tmp_path, "v2")
    assert first == second == read_upstream(tmp_path)
    assert first is not None
    assert first.change is not None
    assert first.change.version == "v2"
    assert caplog.text.count("upstream_changed") == 1
    assert note_version(tmp_path, "v1") == read_upstream(tmp_path) == Upstream("v1")
    assert [path.name for path in tmp_path.iterdir()] == [UPSTREAM]


def test_what_came_from_a_path_has_no_upstream_to_note(tmp_path: Path) -> None:
    assert note_version(tmp_path, "v2") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("note", [b'{"version": 1}', b'{"version": "\xff"}'])
def test_a_note_that_is_damaged_is_told_and_left_out(
    note: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / UPSTREAM).write_bytes(note)
    assert read_upstream(tmp_path) is None
    assert "upstream_unreadable" in caplog.text


def test_a_change_that_cannot_be_noted_is_known_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise StoreError("the disk is full")

    write_upstream(tmp_path, Upstream("v1"))
    monkeypatch.setattr("hearth.store.tiers.upstream.write_upstream", refuse)
    noted = note_version(tmp_path, "v2")
    assert noted is not None
    assert isinstance(noted.change, Change)
    assert "upstream_not_noted" in caplog.text


class TestLook:
    def test_the_keeper_says_which_version_a_url_has(
        self, tmp_path: Path, source: Path, server: BadServer
    ) -> None:
        client = KeeperClient(tmp_path / "s")
        with tiers_at(tmp_path / "root") as tiers, closing(LeaseServer(tiers, tmp_path / "s")):
            version = asyncio.run(client.look_upstream(f"{server.url}/tiny@{DIGEST}"))
            assert version == stored_at(source).manifest.digest
            server.files = {}
            with pytest.raises(ChunkMissing, match=r"manifest.json` does not exist: 404"):
                asyncio.run(client.look_upstream(f"{server.url}/tiny"))

    def test_one_try_is_all_that_a_look_costs(self, server: BadServer) -> None:
        server.plan.extend([says(503)] * 9)
        with pytest.raises(Unreachable, match="tries: 1"):
            version_now(f"{server.url}/tiny")
        assert len(server.asked) == 1

    def test_what_is_no_model_any_more_is_told(self, server: BadServer) -> None:
        server.files = {"/tiny/manifest.json": b"<html>"}
        with pytest.raises(BadCheckpoint):
            version_now(f"{server.url}/tiny")

    def test_a_repository_has_the_version_of_its_commit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[tuple[str, str | None]] = []

        def model_info(repo_id: str, *, revision: str | None, timeout: float) -> SimpleNamespace:
            asked.append((repo_id, revision))
            return SimpleNamespace(sha="c0ffee")

        monkeypatch.setattr(huggingface_hub, "model_info", model_info)
        assert version_now("hf:org/tiny") == version_now("hf:org/tiny@v1") == "c0ffee"
        assert asked == [("org/tiny", None), ("org/tiny", "v1")]

    def test_a_hub_that_cannot_be_reached_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(Unreachable, match="gave no usable answer for `hf:org/tiny`"):
            version_now("hf:org/tiny")


def test_notes_are_read_without_torch() -> None:
    code = "import sys, hearth.store.tiers.upstream; print('torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "False"

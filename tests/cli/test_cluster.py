from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from hearth.cli import cluster as module
from hearth.control.datadir import DataDir
from hearth.core.errors import ConfigError
from hearth.node.credentials import Authority, Credentials, Token
from tests.cli.shell import Hearth
from tests.node.tls_cluster import new_cluster


def invitation(line: str) -> tuple[str, Token]:
    """Return the address and the token of a printed command."""
    program, command, address, option, token = line.split()
    assert (program, command, option) == ("hearth", "join", "--token")
    return address, Token.parse(token)


def test_init_prints_the_command_that_other_machines_run(hearth: Hearth, data_dir: Path) -> None:
    shown = hearth("cluster", "init", "--address", "10.0.0.1:7999")

    address, token = invitation(shown.out)
    authority = Authority.open(data_dir / "cluster")
    assert (shown.code, address, token.fingerprint) == (0, "10.0.0.1:7999", authority.fingerprint)
    assert [status.token_id for status in authority.tokens()] == [token.token_id]
    assert "restart" not in shown.err
    again = hearth("cluster", "init")
    assert (again.code, again.out) == (2, "")
    assert "this machine is the head of a cluster already" in again.err


def test_init_asks_to_restart_a_service_that_runs(hearth: Hearth, data_dir: Path) -> None:
    with DataDir.hold(data_dir):
        assert "restart `hearth serve`" in hearth("cluster", "init", "--address", "10.0.0.1").err


def test_the_address_may_be_a_setting(
    hearth: Hearth, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEARTH_CLUSTER_ADDRESS", "head.example:1234")
    assert invitation(hearth("cluster", "init").out)[0] == "head.example:1234"
    refused = hearth("cluster", "init", "--address", "no address")
    assert (refused.code, refused.out) == (2, "")
    assert "an address is HOST:PORT" in refused.err


def test_tokens_are_made_listed_and_revoked(hearth: Hearth, data_dir: Path) -> None:
    _, first = invitation(hearth("cluster", "init", "--address", "10.0.0.1:7610").out)
    address, second = invitation(hearth("cluster", "token", "--ttl", "1h").out)

    listed = hearth("cluster", "tokens").out
    assert address == "10.0.0.1:7610"
    assert [line.split()[0] for line in listed.splitlines()] == ["ID", first.token_id, second.token_id]
    assert second.secret not in listed
    assert hearth("cluster", "revoke", first.token_id).code == 0
    (left,) = json.loads(hearth("cluster", "tokens", "--json").out)
    assert left["token_id"] == second.token_id
    assert 0 < left["expires_in_s"] <= 3600
    assert hearth("cluster", "revoke", first.token_id).code == 2
    assert "at most 30 days" in hearth("cluster", "token", "--ttl", "31d").err


@pytest.mark.parametrize("words", [("token",), ("tokens",), ("revoke", "x")], ids=" ".join)
def test_without_a_cluster_init_is_named(hearth: Hearth, data_dir: Path, words: tuple[str, ...]) -> None:
    shown = hearth("cluster", *words)
    assert (shown.code, shown.out) == (2, "")
    assert "create one with `hearth cluster init`" in shown.err


def test_join_needs_address_and_token_the_first_time(hearth: Hearth, data_dir: Path) -> None:
    for words in ((), ("10.0.0.1:7610",), ("--token", "x")):
        shown = hearth("join", *words)
        assert (shown.code, shown.out) == (2, "")
        assert "run `hearth cluster token` on the head" in shown.err
    assert "a token looks like" in hearth("join", "10.0.0.1", "--token", "x").err


def test_the_head_does_not_join(hearth: Hearth, data_dir: Path) -> None:
    hearth("cluster", "init", "--address", "10.0.0.1:7610")
    assert "`hearth serve` uses its devices" in hearth("join").err


def test_a_machine_joins_once_and_then_knows_its_cluster(tmp_path: Path) -> None:
    async def scene() -> None:
        cluster, path = new_cluster(tmp_path), tmp_path / "node"
        cluster.joins = True
        async with cluster.listening() as port:
            token, address = cluster.authority.new_token(60), f"127.0.0.1:{port}"
            joined = await module._credentials(path, address, token, "gpu-2")
            assert (joined.name, joined.head) == ("gpu-2", address)

            later = await module._credentials(path, None, None, None)
            assert (later.name, later.head) == ("gpu-2", address)
            again = await module._credentials(path, address, token, None)  # keeps its name
            assert again.name == "gpu-2"
            with pytest.raises(ConfigError, match="this machine is `gpu-2` in its cluster"):
                await module._credentials(path, None, None, "gpu-3")
            moved = await module._credentials(path, "10.9.9.9:1", None, None)
            assert moved.head == "10.9.9.9:1"

    asyncio.run(scene())


def test_a_certificate_that_is_half_over_is_renewed_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        cluster, path = new_cluster(tmp_path), tmp_path / "a"
        cluster.joins = True
        async with cluster.listening() as port:
            before = (path / "node.pem").read_bytes()
            await module._credentials(path, f"127.0.0.1:{port}", None, None)
            assert (path / "node.pem").read_bytes() == before
            monkeypatch.setattr(Credentials, "is_due", True)
            await module._credentials(path, f"127.0.0.1:{port}", None, None)
            assert (path / "node.pem").read_bytes() != before
        known = await module._credentials(path, None, None, None)  # the head is away, which can wait
        assert known.name == "gpu-1"

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("host", "name"),
    [("GPU_2.rack.example", "gpu-2"), ("a" * 60, "a" * 48), ("--x--", "x"), ("node-1", "node-1")],
)
def test_a_host_name_becomes_a_name(monkeypatch: pytest.MonkeyPatch, host: str, name: str) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host)
    assert module.node_name(module.socket.gethostname().partition(".")[0]) == name

"""Joining over real TLS: tokens, names, renewal, and heads that are not the ones they pretend to be."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import uvloop

from hearth.core.errors import ConfigError, HearthError, JoinRefused, Unreachable
from hearth.core.node_messages import AskAuthority, AuthorityCertificate, HeadPulse, Join, NodeMessage
from hearth.node import channel as channel_module
from hearth.node import join as module
from hearth.node.channel import Channel, ClusterPort, Control
from hearth.node.credentials import Authority, Credentials, own_key, signing_request
from hearth.node.join import answer_stranger, join, renew
from tests.node.tls_cluster import ADDRESS, HELLO, Cluster, Scene, member, play_on, to_head


@pytest.fixture(params=[uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def play(request: pytest.FixtureRequest) -> Scene:
    """`hearth join` asks for a certificate on asyncio's own loop, a running agent for the next on uvloop."""
    return partial(play_on, request.param)


@pytest.fixture
def cluster(cluster: Cluster) -> Cluster:
    cluster.joins = True
    return cluster


def joins(cluster: Cluster) -> list[Join]:
    """Return the messages with a secret that have come to the head."""
    messages = [cluster.came.get_nowait()[1] for _ in range(cluster.came.qsize())]
    return [message for message in messages if isinstance(message, Join)]


def strangers_port(
    cluster: Cluster, credentials: Credentials, serve: Callable[[Channel, NodeMessage], Awaitable[None]]
) -> ClusterPort:
    """A port for which all are strangers."""
    control = Control(credentials.server_context(), serve, lambda name, key: False)
    return ClusterPort("127.0.0.1", 0, cluster.on_data, control)


async def refused(cluster: Cluster, token: str, name: str = "gpu-9", port: int | None = None) -> str:
    """Try to join, and return why that failed; it leaves no credentials behind."""
    path = cluster.path / "refused"
    assert cluster.port is not None
    with pytest.raises((JoinRefused, ConfigError)) as caught:
        await join(f"127.0.0.1:{port or cluster.port.port}", token, name, path)
    assert Credentials.open(path) is None
    return str(caught.value)


def test_a_node_joins_and_stays_a_member_without_a_token(cluster: Cluster, play: Scene) -> None:
    async def scene() -> None:
        async with cluster.listening() as port:
            token, path = cluster.authority.new_token(60), cluster.path / "b"
            joined = await join(f"127.0.0.1:{port}", token, "gpu-2", path)
            assert (joined.name, joined.head) == ("gpu-2", f"127.0.0.1:{port}")
            assert {file.name for file in path.iterdir()} == {"ca.pem", "node.pem", "node.key", "head"}
            assert all(file.stat().st_mode & 0o777 == 0o600 for file in path.iterdir())
            assert path.stat().st_mode & 0o777 == 0o700

            opened = Credentials.open(path)
            assert opened is not None
            channel = await to_head(port, opened)
            channel.send(HELLO)
            assert await channel.receive() == HeadPulse()
            channel.close()

    play(scene)


def test_tokens_that_are_not_valid_get_nowhere(cluster: Cluster, play: Scene) -> None:
    async def scene() -> None:
        async with cluster.listening():
            token = cluster.authority.new_token(60)
            assert "a token looks like" in await refused(cluster, "")
            assert "a token looks like" in await refused(cluster, token[:-1])
            wrong = token[:-43] + ("a" if token[-43] != "a" else "b") + token[-42:]
            assert "wrong, expired or revoked" in await refused(cluster, wrong)
            cluster.authority.revoke_token(token.split(".")[2])
            assert "wrong, expired or revoked" in await refused(cluster, token)
            late, tokens = cluster.authority.new_token(60), cluster.path / "head" / "tokens.json"
            stored = json.loads(tokens.read_text())
            stored[late.split(".")[2]]["expires_at_s"] = time.time() - 1
            tokens.write_text(json.dumps(stored))
            assert "wrong, expired or revoked" in await refused(cluster, late)
            assert list(json.loads((cluster.path / "head" / "members.json").read_text())) == ["gpu-1"]

    play(scene)


def test_names_are_not_given_twice(cluster: Cluster, play: Scene) -> None:
    async def scene() -> None:
        async with cluster.listening() as port:
            token = cluster.authority.new_token(60)
            assert "another node of the cluster is called `gpu-1`" in await refused(cluster, token, "gpu-1")
            assert "the name of the head" in await refused(cluster, token, "head")
            again = await join(f"127.0.0.1:{port}", token, "gpu-1", cluster.path / "a")  # its own key
            assert again.name == "gpu-1"
            cluster.authority.remove("gpu-1")
            replaced = await join(f"127.0.0.1:{port}", token, "gpu-1", cluster.path / "b")
            assert replaced.name == "gpu-1"

    play(scene)


def test_a_secret_is_not_sent_to_the_head_of_another_cluster(cluster: Cluster, play: Scene) -> None:
    other = Authority.create(cluster.path / "other", ADDRESS)

    async def scene() -> None:
        async with cluster.listening():
            said = await refused(cluster, other.new_token(60))
            assert "is not the head that made this token; check the address" in said
            assert joins(cluster) == []

    play(scene)


@pytest.mark.parametrize("impostor", ["another cluster's head", "a node of the cluster"])
def test_a_secret_is_not_sent_to_an_impostor_that_shows_the_right_authority(
    cluster: Cluster, play: Scene, impostor: str
) -> None:
    """Anyone can have the authority's certificate, but not a certificate of the head."""
    Authority.create(cluster.path / "other", ADDRESS)
    credentials = cluster.node if "node" in impostor else Credentials.open(cluster.path / "other")
    assert credentials is not None
    came = []

    async def pretend(channel: Channel, first: NodeMessage) -> None:
        message: NodeMessage | None = first
        while message is not None:
            came.append(message)
            channel.send(AuthorityCertificate(cluster.authority.certificate_pem))
            message = await channel.receive()

    async def scene() -> None:
        async with cluster.listening():
            posing = strangers_port(cluster, credentials, pretend)
            said = await refused(cluster, cluster.authority.new_token(60), port=posing.port)
            assert "is not `head` of this cluster" in said
            await posing.close()
        assert came == [AskAuthority()]

    play(scene)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (AuthorityCertificate(b"no certificate"), "is not the head that made this token"),
        (HeadPulse(), "the head has answered HeadPulse; install the same Hearth on both"),
    ],
)
def test_an_answer_that_is_no_authority_is_refused(
    cluster: Cluster, play: Scene, answer: NodeMessage, reason: str
) -> None:
    async def pretend(channel: Channel, first: NodeMessage) -> None:
        channel.send(answer)

    async def scene() -> None:
        async with cluster.listening():
            posing = strangers_port(cluster, cluster.head, pretend)
            said = await refused(cluster, cluster.authority.new_token(60), port=posing.port)
            assert reason in said
            await posing.close()

    play(scene)


def test_an_answer_that_was_lost_can_be_asked_for_again(
    cluster: Cluster, play: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lose_joined(channel: Channel, first: NodeMessage) -> None:
        assert isinstance(first, AskAuthority | Join)
        if isinstance(first, Join):
            channel.send = lambda message: None  # type: ignore[method-assign] # the line is cut here
        await answer_stranger(channel, first, cluster.authority)

    async def scene() -> None:
        token, path = cluster.authority.new_token(60), cluster.path / "b"
        losing = strangers_port(cluster, cluster.head, lose_joined)
        with pytest.raises(Unreachable, match="closed the connection without an answer"):
            await join(f"127.0.0.1:{losing.port}", token, "gpu-2", path)
        await losing.close()
        assert Credentials.open(path) is None
        async with cluster.listening() as port:
            assert (await join(f"127.0.0.1:{port}", token, "gpu-2", path)).name == "gpu-2"

    play(scene)


def test_a_member_renews_by_its_certificate_alone(cluster: Cluster, play: Scene) -> None:
    async def scene() -> None:
        async with cluster.listening() as port:
            (cluster.path / "a" / "head").write_text(f"127.0.0.1:{port}\n")
            old = Credentials.open(cluster.path / "a")
            assert old is not None
            new = await renew(old)
            late = await renew(old)  # as if the first answer had been lost
            assert new._certificate.serial_number != late._certificate.serial_number
            for credentials in (old, new, late):
                channel = await to_head(port, credentials)
                channel.send(HELLO)
                assert await channel.receive() == HeadPulse()
                channel.close()
            cluster.authority.remove("gpu-1")
            with pytest.raises(JoinRefused, match="`gpu-1` is no longer a node of the cluster"):
                await renew(late)

    play(scene)


def test_a_member_cannot_take_the_name_of_another(cluster: Cluster, play: Scene) -> None:
    other = member(cluster.authority, cluster.path / "b", "gpu-2")

    async def scene() -> None:
        async with cluster.listening() as port:
            for name, path in (("gpu-1", "b"), ("gpu-1", "a"), ("gpu-3", "b")):
                channel = await to_head(port, other)
                request = signing_request(name, own_key(cluster.path / path))
                with pytest.raises(JoinRefused, match="the token is wrong"):
                    await module._certificate(channel, Join("", "", name, request))

    play(scene)


def test_a_machine_belongs_to_one_cluster(cluster: Cluster, play: Scene) -> None:
    other = Authority.create(cluster.path / "other", ADDRESS)

    async def scene() -> None:
        async with cluster.listening() as port:
            with pytest.raises(ConfigError, match="a node of another cluster"):
                await join(f"127.0.0.1:{port}", other.new_token(60), "gpu-1", cluster.path / "a")
            with pytest.raises(ConfigError, match="is the head of a cluster"):
                await join(f"127.0.0.1:{port}", other.new_token(60), "gpu-1", cluster.path / "head")

    play(scene)


def test_a_head_that_cannot_write_says_so_without_its_paths(cluster: Cluster, play: Scene) -> None:
    async def scene() -> None:
        async with cluster.listening():
            token = cluster.authority.new_token(60)
            (cluster.path / "head" / "members.json").write_text("[")
            said = await refused(cluster, token)
            assert said == "the head cannot sign certificates now; its log says why"

    play(scene)


def test_a_head_that_does_not_answer_is_unreachable(
    cluster: Cluster, play: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "ANSWER_S", 0.2)

    async def hang(channel: Channel, first: NodeMessage) -> None:
        await asyncio.Event().wait()

    async def scene() -> None:
        port = strangers_port(cluster, cluster.head, hang)
        with pytest.raises(HearthError, match="the head has not answered within"):
            await join(f"127.0.0.1:{port.port}", cluster.authority.new_token(60), "gpu-2", Path("never"))
        await port.close()
        assert not Path("never").exists()

    play(scene)

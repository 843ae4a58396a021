"""Certificates made and used for real: members, tokens, names, and TLS between them over loopback."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from hearth.core.errors import ConfigError, JoinRefused
from hearth.core.types import HEAD, server_name
from hearth.node import credentials as module
from hearth.node.credentials import (
    Authority,
    Credentials,
    Token,
    keep_certificate,
    own_key,
    peer_of,
    signing_request,
)
from tests.node.tls_cluster import ADDRESS, member, token_of


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "head", ADDRESS)


def test_a_token_admits_several_nodes_and_only_its_hash_is_kept(authority: Authority, tmp_path: Path) -> None:
    token = token_of(authority)
    for name in ("gpu-1", "gpu-2"):
        request = signing_request(name, own_key(tmp_path / name))
        assert authority.admit(token.token_id, token.secret, name, request).startswith(b"-----BEGIN CERT")

    files = [path for path in (tmp_path / "head").iterdir() if path.is_file()]
    assert len(files) == 7
    assert all(token.secret not in path.read_text() for path in files)
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)
    assert (tmp_path / "head").stat().st_mode & 0o777 == 0o700
    assert token.secret not in repr(token)


def key_of(credentials: Credentials) -> str:
    return module._key_hash(credentials._certificate.public_key())


def expire(path: Path) -> None:
    tokens = json.loads((path / "tokens.json").read_text())
    for token in tokens.values():
        token["expires_at_s"] = time.time() - 1
    (path / "tokens.json").write_text(json.dumps(tokens))


def test_wrong_expired_and_revoked_tokens_are_refused(authority: Authority, tmp_path: Path) -> None:
    wrong, revoked = token_of(authority), token_of(authority)
    authority.revoke_token(revoked.token_id)
    request = signing_request("gpu-1", own_key(tmp_path / "node"))

    for token_id, secret in (
        (wrong.token_id, revoked.secret),
        ("00000000", wrong.secret),
        (revoked.token_id, revoked.secret),
    ):
        with pytest.raises(JoinRefused, match="wrong, expired or revoked; make a new one"):
            authority.admit(token_id, secret, "gpu-1", request)
    expire(tmp_path / "head")
    with pytest.raises(JoinRefused, match="expired"):
        authority.admit(wrong.token_id, wrong.secret, "gpu-1", request)
    assert authority.tokens() == []
    assert not (tmp_path / "head" / "members.json").exists()


def test_tokens_are_listed_until_they_expire(authority: Authority, tmp_path: Path) -> None:
    first, second = token_of(authority, ttl_s=60.0), token_of(authority, ttl_s=3600.0)

    listed = {status.token_id: status.expires_in_s for status in authority.tokens()}

    assert list(listed) == [first.token_id, second.token_id]
    assert 0 < listed[first.token_id] <= 60 < listed[second.token_id] <= 3600
    expire(tmp_path / "head")
    token_of(authority)
    assert len(json.loads((tmp_path / "head" / "tokens.json").read_text())) == 1
    with pytest.raises(ConfigError, match="no token has the id"):
        authority.revoke_token(first.token_id)


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, 31 * 86400.0, float("inf"), float("nan")])
def test_a_token_without_an_end_is_refused(authority: Authority, ttl_s: float) -> None:
    with pytest.raises(ConfigError, match=r"at most 30 days, given: \S+ days"):
        authority.new_token(ttl_s)


def test_a_name_is_given_again_only_to_its_own_key(authority: Authority, tmp_path: Path) -> None:
    first = member(authority, tmp_path / "a", "gpu-1")
    with pytest.raises(JoinRefused, match="another node of the cluster is called `gpu-1`"):
        member(authority, tmp_path / "b", "gpu-1")
    with pytest.raises(JoinRefused, match="another node of the cluster is called `gpu-1`"):
        authority.renew("gpu-1", signing_request("gpu-1", own_key(tmp_path / "b")))

    again = member(authority, tmp_path / "a", "gpu-1")  # as after a lost answer
    renewed = keep_certificate(
        tmp_path / "a",
        authority.certificate_pem,
        authority.renew("gpu-1", signing_request("gpu-1", own_key(again.path))),
        "head:1",
    )

    keys = [key_of(one) for one in (first, again, renewed)]
    assert [authority.is_member("gpu-1", key) for key in keys] == [True, True, True]


def test_a_removed_member_cannot_renew_and_its_name_is_free(authority: Authority, tmp_path: Path) -> None:
    old = member(authority, tmp_path / "a", "gpu-1")
    assert authority.is_member("gpu-1", key_of(old))

    authority.remove("gpu-1")

    assert not authority.is_member("gpu-1", key_of(old))
    with pytest.raises(JoinRefused, match="no longer a node of the cluster; to join"):
        authority.renew("gpu-1", signing_request("gpu-1", own_key(old.path)))
    new = member(authority, tmp_path / "b", "gpu-1")
    assert authority.is_member("gpu-1", key_of(new))
    assert not authority.is_member("gpu-1", key_of(old))
    with pytest.raises(ConfigError, match="no node of the cluster is called 'gpu-9'; nodes: gpu-1"):
        authority.remove("gpu-9")


@pytest.mark.parametrize(
    "name", ["", "head", "local", "GPU", "gpu.1", "a/b", "-a", "a-", "a" * 49, "ä", "a\n"]
)
def test_names_that_could_be_mistaken_are_refused(authority: Authority, tmp_path: Path, name: str) -> None:
    token = token_of(authority)
    request = signing_request("gpu-1", own_key(tmp_path / "node"))  # the name in the request counts nothing
    with pytest.raises(JoinRefused, match="name"):
        authority.admit(token.token_id, token.secret, name, request)


def test_requests_that_are_not_signed_by_their_own_key_are_refused(
    authority: Authority, tmp_path: Path
) -> None:
    token, key = token_of(authority), own_key(tmp_path / "node")
    request = signing_request("gpu-1", key)
    other_curve = signing_request("gpu-1", ec.generate_private_key(ec.SECP384R1()))
    body = request.split(b"\n")
    forged = b"\n".join([*body[:3], body[3][::-1], *body[4:]])
    for bad in (b"", b"garbage", forged, other_curve, request[: len(request) // 2]):
        with pytest.raises(JoinRefused, match="request for a certificate cannot be used"):
            authority.admit(token.token_id, token.secret, "gpu-1", bad)


def test_an_authority_is_created_once_and_opened_again(authority: Authority, tmp_path: Path) -> None:
    assert Authority.open(tmp_path / "head").fingerprint == authority.fingerprint
    with pytest.raises(ConfigError, match="this machine is the head of a cluster already"):
        Authority.create(tmp_path / "head", ADDRESS)
    member(authority, tmp_path / "a", "gpu-1")
    with pytest.raises(ConfigError, match="this machine is a node of a cluster already"):
        Authority.create(tmp_path / "a", ADDRESS)
    with pytest.raises(ConfigError, match="create one with `hearth cluster init`"):
        Authority.open(tmp_path / "a")
    assert Credentials.open(tmp_path / "nothing") is None


def test_damaged_files_are_named(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "head" / "members.json").write_text("[1")
    with pytest.raises(ConfigError, match=r"members\.json` cannot be read"):
        authority.is_member("gpu-1", "")
    for file in ("node.pem", "ca.key"):
        (tmp_path / "head" / file).write_text("no PEM")
    with pytest.raises(ConfigError, match="cannot be read"):
        Authority.open(tmp_path / "head")
    with pytest.raises(ConfigError, match="cannot be read"):
        Credentials.open(tmp_path / "head")


def test_a_certificate_is_due_when_half_of_its_life_is_over(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not member(authority, tmp_path / "a", "gpu-1").is_due
    monkeypatch.setattr(module, "_NODE_LIFE", module._CLOCK_SKEW / 2)
    assert member(authority, tmp_path / "a", "gpu-1").is_due


def test_a_token_that_is_not_whole_is_refused_without_showing_it() -> None:
    text = f"hearth1.{'a' * 64}.12345678.{'s' * 40}"
    with pytest.raises(ConfigError, match="copy all of what") as caught:
        Token.parse(text)
    assert "sss" not in str(caught.value)


# TLS between two machines.


def shake_hands(
    server: ssl.SSLContext, client: ssl.SSLContext, expects: str
) -> tuple[tuple[str, str] | None, tuple[str, str] | None]:
    """Return whom each side sees: the server its client, the client its server. Raises ssl.SSLError."""
    seen: list[tuple[str, str] | None] = []
    errors: list[OSError] = []
    near, far = socket.socketpair()

    def serve() -> None:
        with far:
            try:
                with server.wrap_socket(far, server_side=True) as connection:
                    seen.append(peer_of(connection))
                    connection.sendall(b"!")
            except OSError as error:
                errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with near, client.wrap_socket(near, server_hostname=server_name(expects)) as connection:
            server_seen = peer_of(connection)
            connection.recv(1)  # only now does a client learn that it was refused
    except OSError as error:
        errors.append(error)
    thread.join()
    if errors:  # the side that has verified says why, the other has an alert
        raise next((error for error in errors if isinstance(error, ssl.SSLCertVerificationError)), errors[0])
    return seen[0], server_seen


def test_members_see_each_others_verified_names(authority: Authority, tmp_path: Path) -> None:
    head, node = Credentials.open(tmp_path / "head"), member(authority, tmp_path / "a", "gpu-1")
    assert head is not None

    contexts = head.server_context(), node.client_context()
    for context in contexts:
        context.verify_flags |= ssl.VERIFY_X509_STRICT  # later versions of Python set it by default
    seen_by_head, seen_by_node = shake_hands(*contexts, HEAD)

    assert seen_by_head == ("gpu-1", key_of(node))
    assert seen_by_node is not None
    assert seen_by_node[0] == HEAD
    assert not authority.is_member(*seen_by_node)


def test_a_node_that_poses_as_the_head_is_refused(authority: Authority, tmp_path: Path) -> None:
    posing, node = (member(authority, tmp_path / name, name) for name in ("gpu-1", "gpu-2"))
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shake_hands(posing.server_context(), node.client_context(), HEAD)


def test_another_cluster_with_the_same_names_is_refused(authority: Authority, tmp_path: Path) -> None:
    other = Authority.create(tmp_path / "other", ADDRESS)
    foreign, node = member(other, tmp_path / "b", "gpu-1"), member(authority, tmp_path / "a", "gpu-1")
    head, other_head = (Credentials.open(tmp_path / name) for name in ("head", "other"))
    assert head is not None
    assert other_head is not None

    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(other_head.server_context(), node.client_context(), HEAD)
    trusting = foreign.client_context()
    trusting.load_verify_locations(tmp_path / "head" / "ca.pem")
    with pytest.raises(ssl.SSLError):
        shake_hands(head.server_context(), trusting, HEAD)


def test_a_client_without_a_certificate_is_nameless(authority: Authority, tmp_path: Path) -> None:
    head = Credentials.open(tmp_path / "head")
    assert head is not None
    nameless = ssl.create_default_context(cadata=authority.certificate_pem.decode())

    seen, _ = shake_hands(head.server_context(), nameless, HEAD)
    assert seen is None


def test_a_member_cannot_sign_certificates(authority: Authority, tmp_path: Path) -> None:
    node = member(authority, tmp_path / "a", "gpu-1")
    forger = Authority(tmp_path / "forged", node._certificate, own_key(tmp_path / "a"))
    (tmp_path / "forged").mkdir()
    posing = member(forger, tmp_path / "b", "gpu-2")
    chain = (tmp_path / "b" / "node.pem").read_bytes() + (tmp_path / "a" / "node.pem").read_bytes()
    (tmp_path / "b" / "node.pem").write_bytes(chain)
    (tmp_path / "b" / "ca.pem").write_bytes(authority.certificate_pem)
    head = Credentials.open(tmp_path / "head")
    assert head is not None

    with pytest.raises(ssl.SSLCertVerificationError, match="invalid CA"):
        shake_hands(head.server_context(), posing.client_context(), HEAD)


def test_older_protocols_than_tls_1_3_are_refused(authority: Authority, tmp_path: Path) -> None:
    head, node = Credentials.open(tmp_path / "head"), member(authority, tmp_path / "a", "gpu-1")
    assert head is not None
    old = node.client_context()
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        shake_hands(head.server_context(), old, HEAD)

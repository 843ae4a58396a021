"""How a machine becomes a node: it pins the authority by its token, asks for a certificate, and keeps it.

    node                                              head
    AskAuthority, over TLS that verifies nothing  ->  AuthorityCertificate, whose hash the node compares
    Join, over TLS that verifies the head         ->  Joined, or NodeRefused

The token's secret is sent only to a head that has proven to belong to the token's cluster.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import ssl
from contextlib import suppress
from pathlib import Path

from cryptography import x509

from hearth.core.config import parse_address
from hearth.core.errors import ConfigError, HearthError, JoinRefused, Unreachable
from hearth.core.node_messages import AskAuthority, AuthorityCertificate, Join, Joined, NodeRefused
from hearth.core.types import HEAD
from hearth.node.channel import Channel, connect
from hearth.node.credentials import (
    Authority,
    Credentials,
    Token,
    check_node_name,
    fingerprint_of,
    keep_certificate,
    own_key,
    signing_request,
)

log = logging.getLogger(__name__)


async def join(address: str, token: str, name: str, path: Path) -> Credentials:
    """Make this machine the node `name` of the cluster whose head is at `address`, and keep that in `path`.

    Raises ConfigError, JoinRefused and Unreachable. An answer that was lost can be asked for again.
    """
    invitation = Token.parse(token)
    check_node_name(name)
    host, port = parse_address(address)
    _refuse_other_cluster(path, invitation)
    ca_pem = await _fetch_authority(host, port, invitation)
    context = ssl.create_default_context(cadata=ca_pem.decode())  # which is the only one that it trusts
    message = Join(invitation.token_id, invitation.secret, name, signing_request(name, own_key(path)))
    certificate_pem = await _certificate(await connect(host, port, context, HEAD), message)
    return keep_certificate(path, ca_pem, certificate_pem, address)


async def renew(credentials: Credentials) -> Credentials:
    """Get a new certificate for the same name and key. Raises JoinRefused and Unreachable."""
    channel = await connect(*parse_address(credentials.head), credentials.client_context(), HEAD)
    request = signing_request(credentials.name, own_key(credentials.path))
    message = Join(token_id="", secret="", name=credentials.name, request=request)
    certificate_pem = await _certificate(channel, message)
    ca_pem = (credentials.path / "ca.pem").read_bytes()
    return keep_certificate(credentials.path, ca_pem, certificate_pem, credentials.head)


async def renew_if_due(credentials: Credentials) -> Credentials:
    """Renew when half of the certificate's life is over and the head answers. Raises JoinRefused."""
    if credentials.is_due:
        with suppress(Unreachable):
            return await renew(credentials)
    return credentials


async def answer_stranger(channel: Channel, message: AskAuthority | Join, authority: Authority) -> None:
    """Answer the first message of a channel, at the head."""
    match message:
        case AskAuthority():
            channel.send(AuthorityCertificate(authority.certificate_pem))
        case Join():
            try:  # on a thread: files are written
                channel.send(Joined(await asyncio.to_thread(_sign, authority, channel.peer, message)))
                log.info("node_admitted name=%s", message.name)
            except JoinRefused as error:
                log.warning("join_refused name=%.80r reason=%s", message.name, error)
                channel.send(NodeRefused(str(error)))
            except (HearthError, OSError) as error:
                log.error("join_failed name=%.80r reason=%s", message.name, error)
                channel.send(NodeRefused("the head cannot sign certificates now; its log says why"))


def _sign(authority: Authority, peer: str | None, message: Join) -> bytes:
    if peer == message.name:
        return authority.renew(message.name, message.request)
    return authority.admit(message.token_id, message.secret, message.name, message.request)


def _refuse_other_cluster(path: Path, invitation: Token) -> None:
    known = path / "ca.pem"
    if (path / "ca.key").exists():
        raise ConfigError(
            f"this machine is the head of a cluster, by the files in `{path}`, and cannot join one"
        )
    if (
        known.exists()
        and fingerprint_of(x509.load_pem_x509_certificate(known.read_bytes())) != invitation.fingerprint
    ):
        raise ConfigError(
            f"this machine is a node of another cluster, by the files in `{path}`; to leave that one, remove "
            "the directory"
        )


async def _fetch_authority(host: str, port: int, invitation: Token) -> bytes:
    """Return the authority's certificate, if it is the one that the token names."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    channel = await connect(host, port, context, None)
    answer = await channel.ask(AskAuthority(), AuthorityCertificate)
    channel.close()
    with suppress(ValueError):  # it is no certificate
        given = fingerprint_of(x509.load_pem_x509_certificate(answer.certificate))
        if hmac.compare_digest(given, invitation.fingerprint):
            return answer.certificate
    raise JoinRefused(
        f"`{host}:{port}` is not the head that made this token; check the address, and make a token there "
        "with `hearth cluster token`"
    )


async def _certificate(channel: Channel, message: Join) -> bytes:
    answer = await channel.ask(message, Joined)
    channel.close()
    return answer.certificate

"""Certificates of a cluster: its authority, the credentials of each machine, tokens to join. Opens no socket.

    DATA_DIR/cluster/  0700
      ca.pem           certificate of the authority
      node.pem         certificate of this machine, with its name
      node.key         0600: its private key
      head             HOST:PORT of the head, as other machines reach it

    only on the head:
      ca.key           0600: private key of the authority
      tokens.json      0600: hashes of the tokens' secrets, and when they expire by the head's clock
      members.json     0600: hash of each node's public key
      drained.json     0600: names of nodes that get no requests

A certificate names a node, not its address, which may change. A node is a member while members.json has the
key of its certificate. A secret is 256 random bits, so a fast hash is safe.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import re
import secrets
import ssl
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hearth.core.atomic_file import write_file
from hearth.core.errors import ConfigError, JoinRefused
from hearth.core.types import HEAD, LOCAL, server_name
from hearth.store.transfer.data_connection import tls_context

T = TypeVar("T")

MAX_NAME_CHARS = 48
MAX_TOKEN_S = 30 * 86400.0
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?", re.ASCII)
_TOKEN = re.compile(r"hearth1\.([0-9a-f]{64})\.([0-9a-f]{8})\.([\w-]{43})", re.ASCII)
#: The head's own certificate lasts as long as the authority, whose key is beside it.
_AUTHORITY_LIFE, _NODE_LIFE = timedelta(days=3650), timedelta(days=365)
#: How far the clock of a machine that checks a new certificate may be behind.
_CLOCK_SKEW = timedelta(days=1)
_SIGNS_CERTIFICATES = x509.KeyUsage(
    key_cert_sign=True,
    crl_sign=False,
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    encipher_only=False,
    decipher_only=False,
)


@dataclass(frozen=True, slots=True)
class Token:
    """An invitation to the cluster: the authority to trust, and a secret."""

    fingerprint: str
    token_id: str
    secret: str = field(repr=False)

    @staticmethod
    def parse(text: str) -> Token:
        parts = _TOKEN.fullmatch(text.strip())
        if parts is None:
            raise ConfigError(
                "a token looks like hearth1.FINGERPRINT.ID.SECRET; copy all of what `hearth cluster token` "
                f"prints on the head, given: {len(text)} characters"
            )
        return Token(parts[1], parts[2], parts[3])

    def __str__(self) -> str:
        return f"hearth1.{self.fingerprint}.{self.token_id}.{self.secret}"


@dataclass(frozen=True, slots=True)
class TokenStatus:
    token_id: str
    expires_in_s: float


class _StoredToken(msgspec.Struct, frozen=True):
    hash: str
    expires_at_s: float  #: since the epoch


class _MemberRecord(msgspec.Struct, frozen=True):
    key: str  #: hash of the public key


class Authority:
    """The certificate authority of a cluster, on the head. Other processes may change its files meanwhile."""

    def __init__(self, path: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._path, self._certificate, self._key = path, certificate, key
        self.fingerprint = fingerprint_of(certificate)
        self.certificate_pem = certificate.public_bytes(serialization.Encoding.PEM)

    @staticmethod
    def create(path: Path, address: str) -> Authority:
        """Make an authority and the credentials of the head. Raises ConfigError if `path` has credentials.

        `address`: HOST:PORT, as other machines reach the head.
        """
        if (path / "ca.pem").exists():
            what = "the head" if (path / "ca.key").exists() else "a node"
            raise ConfigError(
                f"this machine is {what} of a cluster already, by the files in `{path}`; "
                "to leave that cluster for good, remove the directory"
            )
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        key, head_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        subject = _subject(f"hearth cluster {secrets.token_hex(4)}")
        certificate = (
            _certificate(subject, subject, key.public_key(), key.public_key(), _AUTHORITY_LIFE)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_SIGNS_CERTIFICATES, critical=True)
            .sign(key, hashes.SHA256())
        )
        authority = Authority(path, certificate, key)
        head_pem = authority._sign(HEAD, head_key.public_key(), _AUTHORITY_LIFE)
        write_file(path / "ca.key", [_key_pem(key)])
        write_file(path / "node.key", [_key_pem(head_key)])
        keep_certificate(path, authority.certificate_pem, head_pem, address)
        return authority

    @staticmethod
    def open(path: Path) -> Authority:
        """Raises ConfigError if this machine is not the head of a cluster."""
        if not (path / "ca.key").exists():
            raise ConfigError(
                f"this machine is not the head of a cluster: `{path}` has no authority; "
                "create one with `hearth cluster init`"
            )
        with _readable(path):
            certificate = x509.load_pem_x509_certificate((path / "ca.pem").read_bytes())
            return Authority(path, certificate, _read_key(path / "ca.key"))

    def new_token(self, ttl_s: float) -> str:
        """Return a token with which any number of nodes can join until it expires; only its hash is kept."""
        if not 0 < ttl_s <= MAX_TOKEN_S:
            raise ConfigError(
                f"a token is valid for at most {MAX_TOKEN_S / 86400:.0f} days, given: {ttl_s / 86400:g} "
                "days; nodes that have joined need no token"
            )
        token = Token(self.fingerprint, secrets.token_hex(4), secrets.token_urlsafe(32))
        with self._changing():
            stored = _StoredToken(_secret_hash(token.secret), time.time() + ttl_s)
            self._write("tokens.json", self._valid_tokens() | {token.token_id: stored})
        return str(token)

    def tokens(self) -> list[TokenStatus]:
        now_s = time.time()
        return [TokenStatus(one, stored.expires_at_s - now_s) for one, stored in self._valid_tokens().items()]

    def revoke_token(self, token_id: str) -> None:
        """Raises ConfigError if no such token is valid."""
        with self._changing():
            tokens = self._valid_tokens()
            if tokens.pop(token_id, None) is None:
                valid = ", ".join(tokens) or "none"
                raise ConfigError(f"no token has the id {token_id!r:.40}; valid tokens: {valid}")
            self._write("tokens.json", tokens)

    def admit(self, token_id: str, secret: str, name: str, csr_pem: bytes) -> bytes:
        """Make a node a member and return its certificate. Raises JoinRefused."""
        with self._changing():
            stored = self._valid_tokens().get(token_id)
            if stored is None or not hmac.compare_digest(stored.hash, _secret_hash(secret)):
                raise JoinRefused(
                    "the token is wrong, expired or revoked; make a new one on the head with "
                    "`hearth cluster token`"
                )
            return self._enrol(name, csr_pem)

    def renew(self, name: str, csr_pem: bytes) -> bytes:
        """Return a new certificate for a member that has shown one of its own. Raises JoinRefused."""
        with self._changing():
            if name not in self._members():
                raise JoinRefused(not_a_member(name))
            return self._enrol(name, csr_pem)

    def names(self) -> list[str]:
        """Return the names of all members, whether they are up or not."""
        return sorted(self._members())

    def is_member(self, name: str, key: str) -> bool:
        """Say whether the node of that name, with the hash of that key, has joined and was not removed."""
        known = self._members().get(name)
        return known is not None and known.key == key

    def remove(self, name: str) -> None:
        """Raises ConfigError if no node has that name."""
        with self._changing():
            members = self._members()
            if members.pop(name, None) is None:
                known = ", ".join(sorted(members)) or "none"
                raise ConfigError(f"no node of the cluster is called {name!r:.80}; nodes: {known}")
            self._write("members.json", members)

    def drained(self) -> set[str]:
        """Return the names of nodes that get no requests, which outlast a restart of the head."""
        return set(self._read("drained.json", dict[str, bool]))

    def keep_drained(self, names: Iterable[str]) -> None:
        with self._changing():
            self._write("drained.json", dict.fromkeys(sorted(names), True))

    def _enrol(self, name: str, csr_pem: bytes) -> bytes:
        """Sign for a new name, or for a member's own key, as when an earlier answer was lost."""
        check_node_name(name)
        key, members = _requested_key(csr_pem), self._members()
        if name in members and members[name].key != _key_hash(key):
            raise JoinRefused(
                f"another node of the cluster is called `{name}`; choose another name with `--name`, or, "
                f"if this machine replaces that node, first run `hearth nodes rm {name}` on the head"
            )
        if name not in members:
            self._write("members.json", members | {name: _MemberRecord(_key_hash(key))})
        return self._sign(name, key, _NODE_LIFE)

    def _sign(self, name: str, key: ec.EllipticCurvePublicKey, life: timedelta) -> bytes:
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            _certificate(_subject(name), self._certificate.subject, key, self._key.public_key(), life)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(server_name(name))]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM)

    def _members(self) -> dict[str, _MemberRecord]:
        return self._read("members.json", dict[str, _MemberRecord])

    def _valid_tokens(self) -> dict[str, _StoredToken]:
        now_s, stored = time.time(), self._read("tokens.json", dict[str, _StoredToken])
        return {token_id: one for token_id, one in stored.items() if one.expires_at_s > now_s}

    def _read(self, file: str, kind: type[dict[str, T]]) -> dict[str, T]:
        path = self._path / file
        with _readable(path):
            return msgspec.json.decode(path.read_bytes(), type=kind) if path.exists() else {}

    def _write(self, file: str, content: object) -> None:
        write_file(self._path / file, [msgspec.json.format(msgspec.json.encode(content)), b"\n"])

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock of the directory: commands change its files while the service runs."""
        lock = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


class Credentials:
    """Certificate and key of this machine, and the authority that it trusts. Immutable."""

    def __init__(self, path: Path, certificate: x509.Certificate, head: str) -> None:
        self.path = path
        self.name = _common_name(certificate)
        self.head = head  #: HOST:PORT, as other machines reach it
        self._certificate = certificate

    @staticmethod
    def open(path: Path) -> Credentials | None:
        """Return None if this machine is in no cluster. Raises ConfigError."""
        if not (path / "ca.pem").exists():
            return None
        with _readable(path):
            certificate = x509.load_pem_x509_certificate((path / "node.pem").read_bytes())
            return Credentials(path, certificate, (path / "head").read_text().strip())

    @property
    def is_due(self) -> bool:
        """True once half of the certificate's life is over, and it should be renewed."""
        start, end = self._certificate.not_valid_before_utc, self._certificate.not_valid_after_utc
        return datetime.now(UTC) > start + (end - start) / 2

    def server_context(self) -> ssl.SSLContext:
        """Return a context that verifies the certificate of a client that has one."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_OPTIONAL
        return context

    def client_context(self) -> ssl.SSLContext:
        """Return a context that verifies the server's name, `server_name(NODE)`."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, side: ssl._SSLMethod) -> ssl.SSLContext:
        with _readable(self.path):
            return tls_context(self.path, side)


def peer_of(connection: ssl.SSLObject | ssl.SSLSocket) -> tuple[str, str] | None:
    """Return name and key's hash of the peer's certificate, which was verified; None: it has shown none."""
    if not connection.getpeercert():  # empty also where the certificate was not verified
        return None
    encoded = connection.getpeercert(binary_form=True)
    assert encoded is not None, "a certificate that was verified is gone"
    certificate = x509.load_der_x509_certificate(encoded)
    return _common_name(certificate), _key_hash(certificate.public_key())


def keep_certificate(path: Path, ca_pem: bytes, certificate_pem: bytes, head: str) -> Credentials:
    """Keep what the head has signed for the key in `path`."""
    write_file(path / "node.pem", [certificate_pem])
    keep_head(path, head)
    write_file(path / "ca.pem", [ca_pem])  # last: it marks the others as complete
    return Credentials(path, x509.load_pem_x509_certificate(certificate_pem), head)


def keep_head(path: Path, address: str) -> None:
    write_file(path / "head", [f"{address}\n".encode()])


def own_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the key of this machine; the first time, make it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (path / "node.key").exists():
        write_file(path / "node.key", [_key_pem(ec.generate_private_key(ec.SECP256R1()))])
    with _readable(path):
        return _read_key(path / "node.key")


def signing_request(name: str, key: ec.EllipticCurvePrivateKey) -> bytes:
    request = x509.CertificateSigningRequestBuilder().subject_name(_subject(name)).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)


def fingerprint_of(certificate: x509.Certificate) -> str:
    return certificate.fingerprint(hashes.SHA256()).hex()


def node_name(text: str) -> str:
    """Return the name for a machine that is called `text` elsewhere: `10-0-0-2` for 10.0.0.2."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:MAX_NAME_CHARS].strip("-")


def check_node_name(name: str) -> None:
    """Raises JoinRefused. A name has no dot: `NAME.1` is a later life of the node."""
    if _NAME.fullmatch(name) is None:
        raise JoinRefused(
            f"the name of a node is 1 to {MAX_NAME_CHARS} lower-case letters, digits or `-`, and begins and "
            f"ends with a letter or digit, given: {name!r:.80}; choose one with `--name`"
        )
    if name in (HEAD, LOCAL):
        raise JoinRefused(f"`{name}` is the name of the head; choose another with `--name`")


def not_a_member(name: str | None) -> str:
    """Say so to the node of that name, or to a machine without one."""
    who = "this machine is not" if name is None else f"`{name}` is no longer"
    return (
        f"{who} a node of the cluster; to join, make a token on the head with `hearth cluster token` and run "
        "`hearth join HEAD:PORT --token TOKEN` here"
    )


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer_key: ec.EllipticCurvePublicKey,
    life: timedelta,
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _common_name(certificate: x509.Certificate) -> str:
    return str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def _requested_key(csr_pem: bytes) -> ec.EllipticCurvePublicKey:
    """Return the key of a request, whose private part its sender has. Raises JoinRefused."""
    try:
        request = x509.load_pem_x509_csr(csr_pem)
        key = request.public_key()
        if request.is_signature_valid and isinstance(key, ec.EllipticCurvePublicKey) and key.key_size == 256:
            return key
        reason = "it is not signed by a key on the curve P-256"
    except Exception as error:  # cryptography names no base class for what a parser may raise
        reason = str(error)
    raise JoinRefused(f"the node's request for a certificate cannot be used: {reason}")


def _secret_hash(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


def _key_hash(key: CertificatePublicKeyTypes) -> str:
    encoded = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(encoded).hexdigest()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"`{path.name}` holds a key of another kind")
    return key


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # those of msgspec, ssl and cryptography are among them
        raise ConfigError(
            f"the cluster's files in `{path}` cannot be read: {error}; restore them from a backup, or remove "
            "the directory and join again"
        ) from error

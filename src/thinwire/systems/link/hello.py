"""The first messages on a connection: who connects, and whether it may: keys, a secret, or anybody, proven both ways.

With certificates, TLS comes first and is the proof. The rest is the same with or without a secret. The caller names
itself and sends a nonce; the listener sends another; the caller sends a MAC over all of that, and only then the
listener sends its own. A MAC is valid for one direction of one connection: it covers both nonces, the version, the
caller's role and number, and what the connection is for. Each of these messages has a fixed size, and nothing else is
read before the caller's MAC has been verified.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
import struct
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NoReturn

from thinwire.core.duplex import Duplex
from thinwire.core.errors import NotAdmitted, PairError
from thinwire.core.secret_file import VARIABLE
from thinwire.core.sockets import SOCKETS, TOKEN_BYTES
from thinwire.core.tls import Certificate, Credentials


class Insecure(Enum):
    """In place of a secret: whoever reaches the port may connect."""

    INSECURE = "insecure"


INSECURE = Insecure.INSECURE
Trust = Credentials | bytes | Insecure | None
"""Certificates on both sides, a secret that both know, ``INSECURE``, or None: as that, but only on this machine."""
_LEAST = 16


def read_secret(path: str | Path) -> bytes:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"the secret in {path} cannot be read: {error.strerror}") from error
    return _checked(content.strip(), f"the secret in {path}")


def find_trust(
    secret: str | bytes | None = None, keys: str | Path | Credentials | None = None, insecure: bool = False
) -> Trust:
    """Return who may connect, and by what: keys, else a secret, else whoever can.

    Args:
        secret: at least 16 bytes; by default the content of the file that ``THINWIRE_SECRET_FILE`` names.
        keys: credentials, or the directory of an identity.
        insecure: without keys and a secret, let in whoever reaches an address that others reach, too.
    """
    if keys is not None:
        if secret is not None:
            raise ValueError("give keys, or a secret, not both: with certificates nobody needs a secret")
        return keys if isinstance(keys, Credentials) else Credentials.of(keys)
    if secret is not None and not isinstance(secret, (str, bytes)):
        raise ValueError(f"secret= must be a string or bytes, not a {type(secret).__name__}")
    if secret is not None:
        return _checked(secret.encode() if isinstance(secret, str) else secret, "secret=")
    named = os.environ.get(VARIABLE)
    return read_secret(named) if named else INSECURE if insecure else None


def own_trust(trust: Trust) -> Trust:
    """Return the trust between processes of one machine, which all show the same certificate."""
    return trust.own() if isinstance(trust, Credentials) else trust


def _checked(secret: bytes, where: str) -> bytes:
    if len(secret) < _LEAST:
        raise ValueError(
            f"{where} has {len(secret)} bytes and needs at least {_LEAST}: "
            'make one with python -c "import secrets; print(secrets.token_hex())"'
        )
    return secret


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


_WAYS = (
    "give each of its processes keys, with --keys or keys= (thinwire keys new makes them), or all of them one secret, "
    f"with --secret-file FILE, {VARIABLE} or secret=; or let everybody in with --insecure, or insecure=True"
)


def check_host(host: str, trust: Trust, ways: str = _WAYS) -> None:
    """Refuse an address that others can reach if nothing keeps strangers out; ``ways``: what to do about it."""
    if not isinstance(trust, Trust):
        raise ValueError(f"trust={trust!r} must come from find_trust")
    if trust is None and not is_loopback(host):
        raise ValueError(f"whoever reaches {host} could take part in this training: {ways}")


VERSION = 1
NOTES, FRAMES, TENSORS = 0, 1, 2
"""What a connection is for. On a long wire there are more for tensors: the number of the n-th is ``TENSORS + n``."""
AGAIN = TENSORS + SOCKETS
"""One for tensors in place of a lost one. Its token is new: the listener gives it to the peer, for one connection."""
ROLES = ("node", "shard", "worker", "edge")

_MAGIC = b"thinwire"
_FIRST = struct.Struct(f"<8sHBBq{TOKEN_BYTES}s32s")  # magic, version, channel, role, number, token, nonce
_ANSWER = struct.Struct("<8sHB32s")  # magic, version, what is required, nonce
_PROOF = struct.Struct("<32s")
_VERDICT = struct.Struct("<B32s")
_NOTHING, _SECRET, _CERTIFICATE = 0, 1, 2
_IN, _WRONG_SECRET, _WRONG_ROLE, _NOT_ITS_NUMBER = 0, 1, 2, 3
_OF_TLS = b"\x16"  # the first byte of a TLS handshake


@dataclass(frozen=True)
class PeerIdentity:
    """A process's role, its number in that role, what it proves that with, and the certificate it showed."""

    role: str
    number: int
    trust: Trust = field(default=None, repr=False)
    shown: Certificate | None = None


def check_identity(identity: PeerIdentity, role: str, number: int) -> None:
    if (identity.role, identity.number) != (role, number):
        raise ValueError(f"it connected as {identity.role} {identity.number} but speaks as {role} {number}")


@dataclass(frozen=True)
class Introduction:
    """What a caller wants: a channel of the pair named ``token``. ``words``: all bytes exchanged before the proofs."""

    identity: PeerIdentity
    channel: int
    token: bytes
    words: bytes


def introduce(duplex: Duplex, identity: PeerIdentity, channel: int, token: bytes, end: float, host: str = "") -> None:
    """The caller's side of the hello, for a channel of the peer named ``token``. ``NotAdmitted``: it is no use."""
    if isinstance(identity.trust, Credentials):
        try:
            duplex.secure(identity.trust, end, host)
        except NotAdmitted as error:
            raise NotAdmitted(f"{host}: {error}") from error
    secret = _secret_of(identity.trust)
    role = ROLES.index(identity.role)
    first = _FIRST.pack(_MAGIC, VERSION, channel, role, identity.number, token, secrets.token_bytes(32))
    duplex.write(first, end)
    second = duplex.read(_ANSWER.size, end)
    magic, version, asks, _ = _ANSWER.unpack(second)
    if magic != _MAGIC:
        raise PairError("another program answers there")
    if version != VERSION:
        raise NotAdmitted(f"{duplex.host} runs another version of thinwire: install the same one on both")
    if asks == _CERTIFICATE:
        raise NotAdmitted(f"{duplex.host} asks for a certificate: give --keys, or keys= (thinwire keys new makes them)")
    if asks and secret is None:
        raise NotAdmitted(f"{duplex.host} asks for a secret: give --secret-file, THINWIRE_SECRET_FILE or secret=")
    if not asks and secret is not None:
        raise NotAdmitted(f"{duplex.host} lets everybody in, and this process was given a secret: give both the same")
    duplex.write(_proof(secret, b"caller", first + second), end)
    verdict, proof = _VERDICT.unpack(duplex.read(_VERDICT.size, end))
    if verdict == _WRONG_SECRET and secret is None:
        raise PairError("what it sent was changed on the way")
    if verdict == _WRONG_SECRET:
        raise NotAdmitted(f"{duplex.host} has another secret: give both the same")
    if verdict == _NOT_ITS_NUMBER:
        raise NotAdmitted(
            f"{identity.role} {identity.number} belongs to a name other than this certificate's, or that name has too "
            "many numbers: use the certificate that it first used, or a number that no other name uses"
        )
    if verdict != _IN:
        raise NotAdmitted(f"{duplex.host} does not accept {identity.role}s: is this the right address?")
    if not hmac.compare_digest(proof, _proof(secret, b"listener", first + second)):
        raise NotAdmitted(f"whoever listens at {duplex.host} does not know the secret")


def hear(duplex: Duplex, roles: Collection[str], trust: Trust, end: float) -> Introduction:
    """The listener's side of the hello, until it knows the caller; :func:`admit` completes it."""
    secret = _secret_of(trust)
    asks = _NOTHING if secret is None else _SECRET
    if duplex.peek(end) == _OF_TLS:
        if not isinstance(trust, Credentials):
            duplex.read_some(end)
            duplex.write(_ANSWER.pack(_MAGIC, VERSION, asks, bytes(32)), end)  # for a caller that can read it
            raise NotAdmitted("it speaks TLS, and this side has no keys")
        duplex.secure(trust, end)
    elif isinstance(trust, Credentials):
        asks = _CERTIFICATE
    first = duplex.read(_FIRST.size, end)
    magic, version, channel, role, number, token, _ = _FIRST.unpack(first)
    if magic != _MAGIC:
        raise NotAdmitted("it does not speak our protocol")
    second = _ANSWER.pack(_MAGIC, VERSION, asks, secrets.token_bytes(32))
    duplex.write(second, end)
    if asks == _CERTIFICATE:
        raise NotAdmitted("it does not present a certificate")
    if version != VERSION:
        raise NotAdmitted(f"it speaks version {version} of our protocol, not {VERSION}")
    try:
        proof = duplex.read(_PROOF.size, end)
    except PairError as error:
        if secret is None:
            raise
        raise NotAdmitted("it was asked for the secret and did not show it") from error
    if not hmac.compare_digest(proof, _proof(secret, b"caller", first + second)):
        duplex.write(_VERDICT.pack(_WRONG_SECRET, bytes(32)), end)
        raise NotAdmitted("it does not know the secret")
    if role >= len(ROLES) or ROLES[role] not in roles or channel > AGAIN:
        duplex.write(_VERDICT.pack(_WRONG_ROLE, bytes(32)), end)
        raise NotAdmitted("it connects in a role that is not accepted here")
    return Introduction(PeerIdentity(ROLES[role], number, shown=duplex.shown), channel, token, first + second)


def admit(duplex: Duplex, heard: Introduction, trust: Trust, end: float) -> None:
    duplex.write(_VERDICT.pack(_IN, _proof(_secret_of(trust), b"listener", heard.words)), end)


def refuse(duplex: Duplex, end: float) -> NoReturn:
    duplex.write(_VERDICT.pack(_NOT_ITS_NUMBER, bytes(32)), end)
    raise NotAdmitted("it uses a number that belongs to another name")


def _secret_of(trust: Trust) -> bytes | None:
    return trust if isinstance(trust, bytes) else None


def _proof(secret: bytes | None, side: bytes, words: bytes) -> bytes:
    """Return the MAC. Without a secret it proves nothing, but keeps other programs out."""
    return hmac.new(secret or b"", side + b"\0" + words, hashlib.sha256).digest()

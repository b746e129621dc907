"""The first words on a connection: who comes, and on both sides the proof that the shared secret is known.

The caller names itself and sends a nonce; the listener sends another; the caller sends a MAC over all of that, and only
then the listener its own. A MAC holds for one direction of one connection: in it are both nonces, the version, the
caller's role and number and what the connection is for. Each of these messages has one size, and nothing else is read
before the caller's MAC was found right.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Collection
from dataclasses import dataclass, field

from thinwire.link.duplex import Duplex
from thinwire.link.errors import NotAdmitted, PairError

VERSION = 1
NOTES, FRAMES, TENSORS = 0, 1, 2
ROLES = ("node", "shard", "worker")
TOKEN_BYTES = 16

_MAGIC = b"thinwire"
_KNOCK = struct.Struct(f"<8sHBBq{TOKEN_BYTES}s32s")  # magic, version, channel, role, number, token, nonce
_ANSWER = struct.Struct("<8sHB32s")  # magic, version, whether a secret is asked for, nonce
_PROOF = struct.Struct("<32s")
_VERDICT = struct.Struct("<B32s")
_IN, _WRONG_SECRET, _WRONG_ROLE = 0, 1, 2


@dataclass(frozen=True)
class Badge:
    """As whom a process comes: its role, its number there, and the secret that it knows."""

    role: str
    number: int
    secret: bytes | None = field(default=None, repr=False)


def check_badge(badge: Badge, role: str, number: int) -> None:
    """Raise ``ValueError`` where somebody speaks as another than it came as."""
    if (badge.role, badge.number) != (role, number):
        raise ValueError(f"it came as {badge.role} {badge.number} and speaks as {role} {number}")


@dataclass(frozen=True)
class Knock:
    """What a caller wants: a channel of the pair that ``token`` names. ``words``: all that was said."""

    badge: Badge
    channel: int
    token: bytes
    words: bytes


def knock(duplex: Duplex, badge: Badge, channel: int, token: bytes, end: float) -> None:
    """The caller's side.

    Raises:
        NotAdmitted: the listener is of another version, asks for another secret, or does not know it.
        PairError: it does not answer.
    """
    role = ROLES.index(badge.role)
    first = _KNOCK.pack(_MAGIC, VERSION, channel, role, badge.number, token, secrets.token_bytes(32))
    duplex.write(first, end)
    second = duplex.read(_ANSWER.size, end)
    magic, version, asks, _ = _ANSWER.unpack(second)
    if magic != _MAGIC:
        raise PairError("another program answers there")
    if version != VERSION:
        raise NotAdmitted(f"{duplex.host} runs another version of thinwire: install the same one on both")
    if asks and badge.secret is None:
        raise NotAdmitted(f"{duplex.host} asks for a secret: give --secret-file, THINWIRE_SECRET_FILE or secret=")
    if not asks and badge.secret is not None:
        raise NotAdmitted(f"{duplex.host} lets everybody in, and this process was given a secret: give both the same")
    duplex.write(_proof(badge.secret, b"caller", first + second), end)
    verdict, proof = _VERDICT.unpack(duplex.read(_VERDICT.size, end))
    if verdict == _WRONG_SECRET:
        raise NotAdmitted(f"{duplex.host} has another secret: give both the same")
    if verdict != _IN:
        raise NotAdmitted(f"{duplex.host} takes no {badge.role}s: is this the right address?")
    if not hmac.compare_digest(proof, _proof(badge.secret, b"listener", first + second)):
        raise NotAdmitted(f"whoever listens at {duplex.host} does not know the secret")


def hear(duplex: Duplex, roles: Collection[str], secret: bytes | None, end: float) -> Knock:
    """The listener's side, until it knows who comes; :func:`admit` is its last word.

    Raises:
        NotAdmitted: it is a stranger.
        PairError: it went, or said too little in the time.
    """
    first = duplex.read(_KNOCK.size, end)
    magic, version, channel, role, number, token, _ = _KNOCK.unpack(first)
    if magic != _MAGIC:
        raise NotAdmitted("it does not speak our protocol")
    second = _ANSWER.pack(_MAGIC, VERSION, secret is not None, secrets.token_bytes(32))
    duplex.write(second, end)
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
    if role >= len(ROLES) or ROLES[role] not in roles or channel not in (NOTES, FRAMES, TENSORS):
        duplex.write(_VERDICT.pack(_WRONG_ROLE, bytes(32)), end)
        raise NotAdmitted("it comes as somebody who has nothing to do here")
    return Knock(Badge(ROLES[role], number), channel, token, first + second)


def admit(duplex: Duplex, heard: Knock, secret: bytes | None, end: float) -> None:
    """Tell the caller that it is in, and that this side knows the secret too."""
    duplex.write(_VERDICT.pack(_IN, _proof(secret, b"listener", heard.words)), end)


def _proof(secret: bytes | None, side: bytes, words: bytes) -> bytes:
    """Without a secret it proves nothing, and keeps other programs out."""
    return hmac.new(secret or b"", side + b"\0" + words, hashlib.sha256).digest()

"""Who may connect to a process: holders of certificates or of a shared secret, or everybody on this machine."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path

from thinwire.core.secret_file import VARIABLE
from thinwire.systems.link.tls import Credentials

Trust = Credentials | bytes | None
"""Certificates on both sides, a secret that both know, or neither."""
_LEAST = 16


def read_secret(path: str | Path) -> bytes:
    """Return the secret in a file, without surrounding whitespace.

    Raises:
        ValueError: the file cannot be read, or the secret is too short.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"the secret in {path} cannot be read: {error.strerror}") from error
    return _checked(content.strip(), f"the secret in {path}")


def find_secret(given: str | bytes | None = None) -> bytes | None:
    """Return the given secret, else the content of the file that ``THINWIRE_SECRET_FILE`` names, else None.

    Raises:
        ValueError: the secret is too short, or the file cannot be read.
    """
    if given is None:
        named = os.environ.get(VARIABLE)
        return read_secret(named) if named else None
    if not isinstance(given, (str, bytes)):
        raise ValueError(f"secret= must be a string or bytes, not a {type(given).__name__}")
    return _checked(given.encode() if isinstance(given, str) else given, "secret=")


def find_trust(secret: str | bytes | None = None, keys: str | Path | Credentials | None = None) -> Trust:
    """Return the credentials from an identity's directory; without ``keys``, what :func:`find_secret` finds.

    Raises:
        ValueError: both were given, or one cannot be used.
    """
    if keys is None:
        return find_secret(secret)
    if secret is not None:
        raise ValueError("give keys, or a secret, not both: with certificates nobody needs a secret")
    return keys if isinstance(keys, Credentials) else Credentials.of(keys)


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
    """Return whether only this machine can reach that address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_host(host: str, trust: Trust, insecure: bool) -> None:
    """Refuse an address that others can reach if neither keys nor a secret keep strangers out.

    Raises:
        ValueError: the address is such a one.
    """
    if trust is None and not insecure and not is_loopback(host):
        raise ValueError(
            f"whoever reaches {host} could take part in this training: give each of its processes keys, with --keys or "
            f"keys= (thinwire keys new makes them), or all of them one secret, with --secret-file FILE, {VARIABLE} or "
            "secret=; or let everybody in with --insecure, or insecure=True"
        )

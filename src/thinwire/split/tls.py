"""TLS contexts for both ends: version 1.3, certificates on both sides, trust by a CA or by a fingerprint."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from thinwire.split.errors import TrustError


@dataclass(frozen=True)
class Credentials:
    """What one end shows and whom it trusts.

    Attributes:
        certificate: this end's, a PEM file.
        key: its private key, a PEM file.
        ca: the authority that signed the other end's, a PEM file.
        fingerprint: SHA-256 of the other end's certificate (hex, with or without colons): that one and no other.
    """

    certificate: Path
    key: Path
    ca: Path
    fingerprint: str | None = None

    def __post_init__(self) -> None:
        for name in ("certificate", "key", "ca"):
            path = Path(getattr(self, name))
            object.__setattr__(self, name, path)
            if not path.is_file():
                raise ValueError(f"{name}: {path} is no file; thinwire split keys makes the files of a development CA")
        if self.fingerprint is not None and len(_plain(self.fingerprint)) != 64:
            raise ValueError("fingerprint must be the 64 hex digits of a SHA-256: openssl x509 -fingerprint -sha256")
        self.context(server=False)

    @classmethod
    def of(cls, directory: str | Path, role: str) -> Credentials:
        """The files that ``thinwire split keys`` writes: ``<role>.crt``, ``<role>.key``, ``ca.crt``."""
        folder = Path(directory)
        return cls(folder / f"{role}.crt", folder / f"{role}.key", folder / "ca.crt")

    def context(self, *, server: bool) -> ssl.SSLContext:
        """A context of the standard library for one side.

        Raises:
            ValueError: the files do not fit together.
        """
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        made.minimum_version = ssl.TLSVersion.TLSv1_3
        made.verify_mode = ssl.CERT_REQUIRED
        if server:
            made.num_tickets = 0  # no resumption of TLS sessions, and so no tickets on the wire
        try:
            made.load_cert_chain(self.certificate, self.key)
            made.load_verify_locations(self.ca)
        except (ssl.SSLError, OSError) as error:
            raise ValueError(f"{self.certificate}, {self.key} and {self.ca} do not fit together: {error}") from error
        return made

    def check_peer(self, certificate: bytes | None) -> None:
        """Raise `TrustError` unless the other end's certificate (DER) is the one that was pinned, if one was."""
        if self.fingerprint is None:
            return
        found = hashlib.sha256(certificate or b"").hexdigest()
        if not hmac.compare_digest(found, _plain(self.fingerprint)):
            raise TrustError(
                f"the other end shows a certificate with the fingerprint {found}, which is not the pinned one"
            )


def check_plain(host: str, insecure: bool) -> None:
    """Raise ``ValueError`` for a connection without TLS to anywhere but this machine, unless it was asked for."""
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if not local and not insecure:
        raise ValueError(
            f"no keys for a connection with {host}: give --keys (thinwire split keys makes them), or --insecure to "
            "send everything in the clear"
        )


def check_port(port: int, least: int) -> None:
    """Raise ``ValueError`` for what is no port."""
    if isinstance(port, bool) or not isinstance(port, int) or not least <= port <= 65535:
        raise ValueError(f"port={port!r} must be a whole number from {least} to 65535")


def _plain(fingerprint: str) -> str:
    return fingerprint.replace(":", "").strip().lower()

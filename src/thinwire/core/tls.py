"""TLS 1.3 with certificates on both sides: what a process shows, what it trusts, and the cipher of one connection."""

from __future__ import annotations

import hashlib
import socket
import ssl
import threading
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.core.errors import NotAdmitted

_ANOTHER_AUTHORITY = (18, 19, 20, 21)  # OpenSSL's codes for certificates without a trusted authority
_HOST, _CLOCK = ": give thinwire keys new --host the host that is called", ": compare the clocks of both machines"
_ADVICE = {9: _CLOCK, 10: _CLOCK, 62: _HOST, 64: _HOST}  # not yet valid, expired, another host


class Certificate(NamedTuple):
    """What the other side has shown: the certificate's common name (or else its fingerprint) and its SHA-256."""

    name: str
    fingerprint: str


@dataclass(frozen=True)
class Credentials:
    """What a process shows and what it trusts. :meth:`of` finds all three files.

    Attributes:
        certificate: this side's, a PEM file.
        key: its private key, a PEM file.
        ca: the authority that signed the other side's, a PEM file.
        fingerprint: SHA-256 of the other side's certificate (hex, with or without colons): only that certificate is
            accepted, regardless of the hosts it names.
    """

    certificate: Path
    key: Path
    ca: Path
    fingerprint: str | None = None

    def __post_init__(self) -> None:
        for name in ("certificate", "key", "ca"):
            path = Path(getattr(self, name))
            object.__setattr__(self, name, path)
            try:
                path.open("rb").close()
            except OSError as error:
                raise ValueError(
                    f"{name}: {path} cannot be read ({error.strerror}); thinwire keys new makes a directory for each "
                    "machine, with a key that only its owner can read"
                ) from error
        if self.fingerprint is not None:
            object.__setattr__(self, "fingerprint", self.fingerprint.replace(":", "").strip().lower())
        if self.fingerprint is not None and len(self.fingerprint) != 64:
            raise ValueError("fingerprint must be the 64 hex digits of a SHA-256: thinwire keys show prints it")
        assert self.contexts

    @classmethod
    def of(cls, directory: str | Path) -> Credentials:
        """Return the identity that ``thinwire keys new`` wrote: ``identity.crt``, ``identity.key``, ``ca.crt``."""
        folder = Path(directory)
        return cls(folder / "identity.crt", folder / "identity.key", folder / "ca.crt")

    def pinned(self, fingerprint: str) -> Credentials:
        """Return the same credentials, accepting only that certificate from the other side."""
        return replace(self, fingerprint=fingerprint)

    def own(self) -> Credentials:
        """Return the same credentials, accepting only processes that show this same certificate."""
        return self.pinned(self.own_fingerprint)

    @property
    def own_fingerprint(self) -> str:
        _, head, rest = self.certificate.read_text(encoding="utf-8").partition(ssl.PEM_HEADER)
        body, foot, _ = rest.partition(ssl.PEM_FOOTER)  # the first certificate; those of a chain follow
        return _fingerprint(ssl.PEM_cert_to_DER_cert(head + body + foot))

    @cached_property
    def contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """The standard library's contexts: for the side that calls, and for the side that listens."""
        calls, listens = (ssl.SSLContext(kind) for kind in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER))
        calls.check_hostname, calls.hostname_checks_common_name = self.fingerprint is None, False
        listens.num_tickets = 0  # no resumption of TLS sessions, so no tickets are sent
        try:
            for made in (calls, listens):
                made.minimum_version = ssl.TLSVersion.TLSv1_3
                made.verify_mode = ssl.CERT_REQUIRED
                made.load_cert_chain(self.certificate, self.key)
                made.load_verify_locations(self.ca)
        except (ssl.SSLError, OSError) as error:
            raise ValueError(f"{self.certificate}, {self.key} and {self.ca} do not fit together: {error}") from error
        return calls, listens


class Cipher:
    """TLS over memory: one thread may encrypt while another decrypts. ``host``: that was called; None: this listens."""

    def __init__(self, credentials: Credentials, host: str | None) -> None:
        self._credentials = credentials
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = credentials.contexts[host is None].wrap_bio(
            self._arrived, self._leaving, server_side=host is None, server_hostname=host
        )
        self._lock = threading.Lock()  # OpenSSL's object must not be used by two threads at once

    def handshake_step(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            raise NotAdmitted(in_words(error)) from error
        pinned = self._credentials.fingerprint
        if pinned not in (None, self.shown().fingerprint):
            raise NotAdmitted(
                f"the other end presented a certificate with fingerprint {self.shown().fingerprint}, which is not the "
                "pinned one"
            )
        return True

    def shown(self) -> Certificate:
        subject = (self._tls.getpeercert() or {}).get("subject", ())
        names = [value for part in subject for name, value in part if name == "commonName"]  # type: ignore[str-unpack]
        fingerprint = _fingerprint(self._tls.getpeercert(True) or b"")
        return Certificate(str(names[0]) if names else fingerprint, fingerprint)

    def encrypt(self, data: memoryview) -> bytes:
        """Encrypt ``data``; return the bytes to send, including outstanding ones of the handshake."""
        with self._lock:
            if data:
                self._tls.write(data)
            return self._leaving.read()

    def feed(self, data: memoryview) -> None:
        with self._lock:
            self._arrived.write(data)

    def decrypt_into(self, view: memoryview) -> int:
        """Decrypt received data into ``view`` and return the number of bytes; an incomplete record waits."""
        count = 0
        with self._lock:
            while count < len(view):
                try:
                    filled: Any = self._tls.read(len(view) - count, view[count:])
                except ssl.SSLWantReadError:
                    break
                except ssl.SSLError as error:
                    raise NotAdmitted(in_words(error)) from error
                count += filled
        return count


class CipherSocket(socket.socket):
    """A connected socket that does not block, whose bytes a cipher has encrypted from its handshake on.

    As with an ``ssl.SSLSocket``, who could not ``send`` calls again with the same bytes.
    """

    def __init__(self, connection: socket.socket, cipher: Cipher) -> None:
        super().__init__(fileno=connection.detach())
        self.setblocking(False)
        self._cipher, self._room = cipher, memoryview(bytearray(1 << 16))
        self._left, self._pending = memoryview(b""), True
        self.extra_sent = self.extra_received = 0
        """How many bytes the cipher adds."""

    def pending(self) -> bool:
        """Return whether there may be bytes that have been received but not yet returned."""
        return self._pending

    def send(self, data: Any, flags: int = 0) -> int:
        if not self._left:
            self._left = memoryview(self._cipher.encrypt(data))
            self.extra_sent += len(self._left) - len(data)
        while self._left:
            self._left = self._left[super().send(self._left, flags) :]
        return len(data)

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        try:
            if not (count := self._cipher.decrypt_into(buffer)):
                self._pending = False
                if not (come := super().recv_into(self._room, nbytes, flags)):
                    return 0
                self.extra_received += come
                self._cipher.feed(self._room[:come])
                count = self._cipher.decrypt_into(buffer)
        except NotAdmitted as error:
            raise OSError(str(error)) from error
        self.extra_received -= count
        self._pending = count == len(buffer)
        if not count:
            raise BlockingIOError
        return count


def _fingerprint(certificate: bytes) -> str:
    return hashlib.sha256(certificate).hexdigest()


def in_words(error: ssl.SSLError) -> str:
    """Say why the other end of a connection cannot be trusted, or does not trust this one."""
    if isinstance(error, ssl.SSLCertVerificationError):
        why = "another authority signed it" if error.verify_code in _ANOTHER_AUTHORITY else error.verify_message
        return f"the other end's certificate cannot be trusted: {why}{_ADVICE.get(error.verify_code, '')}"
    reason = (error.reason or str(error)).replace("_", " ").lower()
    if "alert" in reason:
        bad = f"{_CLOCK}, and the host that was called with the certificate's" if "bad cert" in reason else ""
        return f"the other end refused this end's certificate ({reason}){_CLOCK if 'expired' in reason else bad}"
    if "did not return a certificate" in reason:
        return "the other end presented no certificate"
    return f"the other end does not speak TLS ({reason}): give keys to both ends, or to neither"

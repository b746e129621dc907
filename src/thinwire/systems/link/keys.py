"""A development CA, and for each machine an identity: a certificate with its key. Not for production."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"(\*\.)?{_LABEL}(\.{_LABEL})*")
_HERE = ("localhost", "127.0.0.1")
_ISSUER = "thinwire development CA"


@dataclass(frozen=True)
class Issued:
    """The contents of a certificate.

    Attributes:
        directory: of its files, for ``--keys``.
        name: by which others know it.
        hosts: names and addresses at which others reach it; empty: nobody connects to it.
        expires: the last valid day.
        fingerprint: SHA-256 of the certificate, hex.
    """

    directory: Path
    name: str
    hosts: tuple[str, ...]
    expires: datetime.date
    fingerprint: str


def new_keys(directory: str | Path, names: Sequence[str], hosts: Sequence[str] = (), days: int = 90) -> list[Issued]:
    """Make an identity for each name, each in its own directory, and a signing authority if there is none yet.

    ``<directory>/<name>`` holds what that machine needs: ``identity.crt``, ``identity.key`` and ``ca.crt``. The
    authority's key, ``<directory>/ca.key``, signs further identities and is copied to no machine. Only the owner can
    read the keys.

    Args:
        directory: created if needed; existing files are not replaced.
        names: of the identities; the machine that others connect to comes first.
        hosts: names and addresses of that machine; if the authority is new, localhost and 127.0.0.1 too.
        days: how long the certificates are valid.

    Raises:
        ValueError: a name cannot be a file name, a host is invalid, an identity exists already, or the directory cannot
            be written.
    """
    x509 = _cryptography()
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder = Path(directory)
    if not names or len(set(names)) < len(names):
        raise ValueError("each machine needs its own name: --names server,a,b")
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(f"name {name!r} must be letters, digits, - and _")
        if (folder / name).exists():
            raise ValueError(f"{folder / name} already exists: choose another name or directory, or remove it")
    if days < 1:
        raise ValueError(f"days={days} must be at least 1")
    known = {name: _host(name, x509) for name in hosts}
    now = datetime.datetime.now(datetime.timezone.utc)

    def certificate(name: str, key: Any, signer: Any, *extensions: tuple[Any, bool]) -> bytes:
        built = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _ISSUER)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        )
        for extension, critical in extensions:
            built = built.add_extension(extension, critical=critical)
        made: bytes = built.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        return made

    def private(key: Any) -> bytes:
        form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        made: bytes = key.private_bytes(*form)
        return made

    contents: dict[Path, bytes] = {}
    if (folder / "ca.crt").exists() and not (folder / "ca.key").exists():
        raise ValueError(f"{folder} has an authority without its key (ca.key), so it cannot sign: choose another")
    if (folder / "ca.key").exists():
        try:
            authority: Any = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
            signed = (folder / "ca.crt").read_bytes()
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(f"{folder} does not hold an authority from thinwire keys new: {error}") from error
    else:
        authority = ec.generate_private_key(ec.SECP256R1())
        signs = x509.KeyUsage(
            digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
            data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        basic = x509.BasicConstraints(ca=True, path_length=0)
        signed = certificate(_ISSUER, authority, authority, (basic, True), (signs, True))
        contents |= {folder / "ca.key": private(authority), folder / "ca.crt": signed}
        known |= {name: _host(name, x509) for name in _HERE}
    for name in names:
        key, basic = ec.generate_private_key(ec.SECP256R1()), x509.BasicConstraints(ca=False, path_length=None)
        reached = [(x509.SubjectAlternativeName(known.values()), False)] if known and name == names[0] else []
        contents[folder / name / "identity.crt"] = certificate(name, key, authority, (basic, True), *reached)
        contents[folder / name / "identity.key"] = private(key)
        contents[folder / name / "ca.crt"] = signed
    _write(folder, contents)
    return [_read(folder / name, x509) for name in names]


def show_keys(directory: str | Path) -> list[Issued]:
    """Return the identities in a directory written by :func:`new_keys`, or the one in a machine's directory.

    Raises:
        ValueError: there is none.
    """
    x509, folder = _cryptography(), Path(directory)
    found = sorted(path.parent for path in (*folder.glob("identity.crt"), *folder.glob("*/identity.crt")))
    if not found:
        raise ValueError(f"{folder} holds no keys: thinwire keys new makes them")
    return [_read(path, x509) for path in found]


def _read(folder: Path, x509: Any) -> Issued:
    from cryptography.hazmat.primitives import hashes

    try:
        found = x509.load_pem_x509_certificate((folder / "identity.crt").read_bytes())
        (name,) = found.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        hosts = tuple(str(host.value) for host in names)
    except x509.ExtensionNotFound:
        hosts = ()
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / 'identity.crt'} is not a certificate from thinwire keys new: {error}") from error
    expires = found.not_valid_after_utc.date()
    return Issued(folder, name.value, hosts, expires, found.fingerprint(hashes.SHA256()).hex())


def _write(folder: Path, contents: dict[Path, bytes]) -> None:
    """Write all of the files or, if that fails, none of them."""
    made: list[Path] = []
    try:
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            mode = 0o600 if path.suffix == ".key" else 0o666
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                made.append(path)
                file.write(content)
    except OSError as error:
        for path in made:
            path.unlink()
        for place in {path.parent for path in contents} - {folder}:
            with suppress(OSError):
                place.rmdir()
        raise ValueError(f"cannot write to {folder}: {error}") from error


def _host(host: str, x509: Any) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _HOST.fullmatch(host) or host.rpartition(".")[2].isdigit():
            raise ValueError(f"host {host!r} is neither a name nor an address: use --host cloud.example.org") from None
        return x509.DNSName(host)


def _cryptography() -> Any:
    try:
        from cryptography import x509
    except ImportError as error:
        raise ValueError("keys are made and shown with cryptography: pip install 'thinwire[keys]'") from error
    return x509

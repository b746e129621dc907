"""A development CA: one authority, a certificate for the cloud, one for each edge. Not for production."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire.split.models import require

_DAYS = 90
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"(\*\.)?{_LABEL}(\.{_LABEL})*")


def write_keys(
    directory: str | Path, hosts: Sequence[str] = ("localhost", "127.0.0.1"), edges: Sequence[str] = ("edge",)
) -> list[Path]:
    """Write ``ca.crt``, and ``.crt`` and ``.key`` of ``cloud`` and of every edge. Keys are readable by the owner alone.

    The authority's own key is thrown away: nobody can sign more certificates with it.

    Args:
        directory: made if needed; files that are there are not replaced.
        hosts: names and addresses under which edges reach the cloud.
        edges: a name each; the cloud tells edges apart by them.

    Returns:
        The files.

    Raises:
        ValueError: no host or one that cannot be, a name that is no file name, a file is there already, or the
            directory cannot be written.
    """
    require("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    folder = Path(directory)
    names = ["cloud", *edges]
    if not hosts:
        raise ValueError("name at least one host under which edges reach the cloud: --host cloud.example.org")
    for name in edges:
        if not _NAME.fullmatch(name) or name in ("ca", "cloud"):
            raise ValueError(f"edge name {name!r} must be letters, digits, - and _, and neither ca nor cloud")
    known = [_host(host, x509) for host in hosts]
    if len(set(names)) < len(names):
        raise ValueError("two edges of one name: give each its own")
    paths = [folder / "ca.crt", *(folder / f"{name}.{end}" for name in names for end in ("crt", "key"))]
    for path in paths:
        if path.exists():
            raise ValueError(f"{path} is there already: choose another directory, or remove it")
    now = datetime.datetime.now(datetime.timezone.utc)

    def certificate(name: str, key: Any, issuer: str, signer: Any, extensions: Sequence[tuple[Any, bool]]) -> bytes:
        built = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=_DAYS))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        )
        for extension, critical in extensions:
            built = built.add_extension(extension, critical=critical)
        return built.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    authority = ec.generate_private_key(ec.SECP256R1())
    issuer = "thinwire development CA"
    signs = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    basic = x509.BasicConstraints(ca=True, path_length=0)
    contents = [certificate(issuer, authority, issuer, authority, [(basic, True), (signs, True)])]
    for name in names:
        key = ec.generate_private_key(ec.SECP256R1())
        usage = ExtendedKeyUsageOID.SERVER_AUTH if name == "cloud" else ExtendedKeyUsageOID.CLIENT_AUTH
        extensions: list[tuple[Any, bool]] = [
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (x509.ExtendedKeyUsage([usage]), False),
        ]
        if name == "cloud":
            extensions.append((x509.SubjectAlternativeName(known), False))
        contents.append(certificate(name, key, issuer, authority, extensions))
        contents.append(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
    _write(folder, paths, contents)
    return paths


def _write(folder: Path, paths: Sequence[Path], contents: Sequence[bytes]) -> None:
    """All of the files or, if that cannot be, none of them."""
    made: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in zip(paths, contents):
            mode = 0o600 if path.suffix == ".key" else 0o666
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                made.append(path)
                file.write(content)
    except OSError as error:
        for path in made:
            path.unlink()
        raise ValueError(f"cannot write to {folder}: {error}") from error


def _host(host: str, x509: Any) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _HOST.fullmatch(host) or host.rpartition(".")[2].isdigit():
            raise ValueError(f"host {host!r} is no name and no address: write --host cloud.example.org") from None
        return x509.DNSName(host)

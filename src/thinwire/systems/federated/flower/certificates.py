"""A certificate authority and a server certificate, for the user's own SuperLink."""

from __future__ import annotations

import datetime
import ipaddress
import os
from pathlib import Path
from typing import Any

CA, CERTIFICATE, KEY = "ca.crt", "server.pem", "server.key"
_DAYS = 365


def ensure_certificates(folder: Path, host: str) -> None:
    """Make the three files unless they exist. The authority's private key is not kept: it signs only once.

    Args:
        folder: created if needed.
        host: name or address to which SuperNodes connect; "localhost" and 127.0.0.1 are included too.

    Raises:
        ValueError: only some of the files exist.
    """
    there = [name for name in (CA, CERTIFICATE, KEY) if (folder / name).exists()]
    if len(there) == 3:
        return
    if there:
        raise ValueError(f"{folder} holds {', '.join(there)} only: give all of {CA}, {CERTIFICATE}, {KEY}, or none")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.timezone.utc)

    def named(text: str) -> Any:
        return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, text)])

    def begun(subject: Any, issuer: Any, key: Any) -> Any:
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        return builder.not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(
            now + datetime.timedelta(days=_DAYS)
        )

    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    name = named("thinwire federation")
    constraints = x509.BasicConstraints(ca=True, path_length=0)
    authority = begun(name, name, authority_key).add_extension(constraints, critical=True)
    names = [_name(x509, text) for text in dict.fromkeys((host, "localhost", "127.0.0.1"))]
    server = begun(named(host), name, key).add_extension(x509.SubjectAlternativeName(names), critical=False)
    pem = serialization.Encoding.PEM
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / CA).write_bytes(authority.sign(authority_key, hashes.SHA256()).public_bytes(pem))
    (folder / CERTIFICATE).write_bytes(server.sign(authority_key, hashes.SHA256()).public_bytes(pem))
    handle = os.open(folder / KEY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(key.private_bytes(pem, *plain))


def _name(x509: Any, text: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)

"""What a deployment needs beside Flower: certificates that a client accepts, an app folder."""

import os
import socket
import ssl
import threading

import pytest

from thinwire.systems.federated.flower.deploy import CA, CERTIFICATE, KEY, ensure_certificates, write_app
from thinwire.tools.cli.main import app
from verbs import CliRunner


def handshake(folder, authority, name):
    """Connect over TLS on loopback, as a SuperNode does: the server's certificate must be of this authority."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    client = ssl.create_default_context(cafile=authority)
    ours, theirs = socket.socketpair()

    def accept():
        try:
            with server.wrap_socket(theirs, server_side=True) as wrapped:
                wrapped.recv(1)
        except OSError:
            pass

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        with client.wrap_socket(ours, server_hostname=name) as wrapped:
            wrapped.send(b"x")
    finally:
        ours.close()
        thread.join(10)


def test_certificates(tmp_path):
    pytest.importorskip("cryptography")
    one, two = tmp_path / "one", tmp_path / "two"
    ensure_certificates(one, "10.1.2.3")
    ensure_certificates(two, "example.org")
    for name in ("10.1.2.3", "127.0.0.1", "localhost"):
        handshake(one, one / CA, name)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(one, two / CA, "localhost")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(two, two / CA, "10.1.2.3")
    assert os.stat(one / KEY).st_mode & 0o077 == 0
    before = (one / CA).read_bytes()
    ensure_certificates(one, "10.1.2.3")
    assert (one / CA).read_bytes() == before  # what is there is kept
    (one / KEY).unlink()
    with pytest.raises(ValueError, match=r"ca.crt, server.pem only: give all"):
        ensure_certificates(one, "10.1.2.3")


def test_the_app_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def build(): ...\n")
    (tmp_path / "helper.py").write_text("")
    (tmp_path / "data.csv").write_text("")
    write_app(tmp_path / "app", "mine:build")
    assert sorted(p.name for p in (tmp_path / "app").iterdir()) == [
        "helper.py", "mine.py", "pyproject.toml", "thinwire_app.py",
    ]  # fmt: skip
    text = (tmp_path / "app" / "thinwire_app.py").read_text()
    compile(text, "thinwire_app.py", "exec")
    assert "from mine import build" in text
    for wrong in ("mine", "none:build", "mine:a b"):
        with pytest.raises(ValueError, match="must be module:function with a file"):
            write_app(tmp_path / "other", wrong)


def test_serve_without_flower(tmp_path, monkeypatch):
    try:
        import flwr  # noqa: F401
    except ImportError:
        monkeypatch.chdir(tmp_path)
        done = CliRunner().invoke(app, ["federated", "serve", "mine:build"])
        assert done.exit_code == 2
        assert "a deployment needs Flower, in its own environment" in done.output
    else:
        pytest.skip("Flower is installed here")

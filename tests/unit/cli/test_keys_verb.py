"""``thinwire keys``: what is written, who may read it, and what is refused."""

import json
import re
import shlex
import ssl
from pathlib import Path

import pytest

from thinwire.core.tls import Credentials
from thinwire.systems.link.keys import new_keys, show_keys
from verbs import call

DOCS = Path(__file__).parents[3] / "docs"


def refused(says, *words):
    *_, last = call("keys", "new", *words, code=2).stderr.strip().splitlines()
    assert last.startswith("error: ")
    assert says in last


def test_a_directory_for_each_machine_and_the_authority_apart(tmp_path):
    said = call("keys", "new", "keys", "--names", "server, a", "--host", "10.0.0.1", "--host", "*.example.org").stdout
    assert "keys/server: server, reached at 10.0.0.1, *.example.org, localhost, 127.0.0.1; until" in said
    assert "keys/ca.key signs more and stays here" in said
    assert sorted(path.name for path in (tmp_path / "keys").iterdir()) == ["a", "ca.crt", "ca.key", "server"]
    for name in ("server", "a"):
        files = {path.name: path for path in (tmp_path / "keys" / name).iterdir()}
        assert sorted(files) == ["ca.crt", "identity.crt", "identity.key"]
        assert files["identity.key"].stat().st_mode & 0o077 == 0
        assert Credentials.of(tmp_path / "keys" / name)
    assert (tmp_path / "keys" / "ca.key").stat().st_mode & 0o077 == 0


def test_more_of_them_are_signed_by_the_same_authority(tmp_path):
    new_keys("keys", ["server"])
    before = (tmp_path / "keys" / "ca.crt").read_bytes()
    made = json.loads(call("keys", "new", "keys", "--names", "b,c", "--days", "3", "--json").stdout)
    assert [(one["directory"], one["name"], one["hosts"]) for one in made] == [("keys/b", "b", []), ("keys/c", "c", [])]
    assert (tmp_path / "keys" / "ca.crt").read_bytes() == before == (tmp_path / "keys" / "c" / "ca.crt").read_bytes()
    shown = {one["name"]: one for one in json.loads(call("keys", "show", "keys", "--json").stdout)}
    assert sorted(shown) == ["b", "c", "server"]
    assert shown["server"]["hosts"] == ["localhost", "127.0.0.1"]
    assert shown["b"]["expires"] < shown["server"]["expires"]
    assert shown["c"]["fingerprint"] == Credentials.of("keys/c").own().fingerprint
    assert [one.name for one in show_keys("keys/c")] == ["c"]
    assert (
        f"keys/c: c; until {shown['c']['expires']}; {shown['c']['fingerprint']}"
        in call("keys", "show", "keys/c").stdout
    )


def test_what_is_there_is_not_replaced_and_nothing_is_half_written(tmp_path):
    new_keys("keys", ["server"])
    refused("keys/server already exists", "keys", "--names", "server")
    for host in ("", "a b", "cloud.example.org:7443", "ä.example.org", "-a", "a..b", "10.0.0.300"):
        refused(f"host {host!r} is neither a name nor an address", "other", "--names", "a", "--host", host)
    for name in ("a/b", "", "..", "a b"):
        refused(f"name {name!r} must be letters", "other", "--names", f"server,{name}")
    refused("its own name", "other", "--names", "a,a")
    refused("days=0 must be at least 1", "other", "--names", "a", "--days", "0")
    assert not (tmp_path / "other").exists()
    (tmp_path / "file").write_text("x")
    refused("cannot write to file", "file", "--names", "a")
    refused("cannot write to file/below", "file/below", "--names", "a")
    (tmp_path / "keys" / "ca.key").write_text("spoiled")
    refused("keys does not hold an authority", "keys", "--names", "a")
    (tmp_path / "keys" / "ca.key").unlink()
    refused("keys has an authority without its key", "keys", "--names", "a")
    (tmp_path / "keys" / "ca.crt").unlink()
    (tmp_path / "keys" / "ca.crt").symlink_to("nowhere")  # is not there, and cannot be made
    refused("cannot write to keys", "keys", "--names", "a")
    assert sorted(path.name for path in (tmp_path / "keys").iterdir()) == ["ca.crt", "server"]
    assert "holds no keys: thinwire keys new makes them" in call("keys", "show", "other", code=2).stderr
    (tmp_path / "keys" / "server" / "identity.crt").write_text("spoiled")
    assert "identity.crt is not a certificate from thinwire keys new" in call("keys", "show", "keys", code=2).stderr
    with pytest.raises(ValueError, match="do not fit together"):
        Credentials.of("keys/server")


def test_a_file_with_a_chain_of_certificates_shows_its_first(tmp_path):
    new_keys("keys", ["server"])
    path = tmp_path / "keys" / "server" / "identity.crt"
    alone = Credentials.of("keys/server").own().fingerprint
    path.write_text("subject=server\n" + path.read_text() + (tmp_path / "keys" / "ca.crt").read_text())
    assert Credentials.of("keys/server").own().fingerprint == alone
    assert ssl.PEM_HEADER in path.read_text()


@pytest.mark.parametrize("page", ["security", "split", "parameter_server"])
def test_the_commands_of_the_pages_do_what_they_say(page):
    commands = re.findall(r"^thinwire keys (.*)$", (DOCS / f"{page}.md").read_text(), re.MULTILINE)
    assert commands
    for words in commands:
        call("keys", *shlex.split(words, comments=True))
    there = {one.name: one for one in show_keys("keys")}
    given = re.findall(r"--keys keys/(\w+)", (DOCS / f"{page}.md").read_text())
    assert set(given) <= set(there)
    called = {host for one in there.values() for host in one.hosts} - {"localhost", "127.0.0.1"}
    assert called in ({"10.0.0.1"}, {"cloud.example.org"})

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from thinwire.tools.cli.doctor import report
from thinwire.tools.doctor import Facts, Interface, Name, judge
from verbs import call

DEBIAN = Facts(
    thinwire="0.1.0",
    python="3.11.7",
    torch="2.13.0",
    interfaces=(
        Interface("lo", kind="loopback", addresses=("127.0.0.1",)),
        Interface("eth0", addresses=("192.0.2.7",), mbits=1000, mtu=1500, packets=10, errors=1),
    ),
    default_route="eth0",
    hostname=Name("worker", ("127.0.1.1",), ("127.0.1.1",)),
    lab="root",
)


@pytest.fixture
def debian(tmp_path):
    path = tmp_path / "facts.json"
    path.write_text(json.dumps(report(DEBIAN, judge(DEBIAN))))
    return str(path)


def test_this_machine_says_of_another_what_that_one_said(debian):
    found = json.loads(call("doctor", "--json", "--read", debian).stdout)
    assert found == json.loads(Path(debian).read_text())
    assert found["interface"] == "lo"
    assert [one["code"] for one in found["findings"]] == ["hostname-loopback"]


def test_only_what_prevents_training_changes_the_exit_code(debian):
    said = " ".join(call("doctor", "--read", debian, "--nodes", "2", code=1).stdout.split())
    assert "error: Gloo will listen on 127.0.1.1" in said
    assert "GLOO_SOCKET_IFNAME=eth0" in said
    assert "192.0.2.7" in said
    assert "warning: Gloo will listen on 127.0.1.1" in " ".join(call("doctor", "--read", debian).stdout.split())


def test_a_narrow_terminal_cuts_no_value(tmp_path):
    facts = replace(DEBIAN, platform="Linux-6.18.44-x86_64-with-glibc2.36")
    path = tmp_path / "facts.json"
    path.write_text(json.dumps(report(facts, judge(facts))))
    shown = call("doctor", "--read", str(path), env={"COLUMNS": "40"}).stdout
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    assert facts.platform in re.sub(r"[^\w.-]", "", shown)


def test_what_listens_is_told_and_the_page_says_the_same(debian):
    found = json.loads(call("doctor", "--json", "--read", debian).stdout)["listeners"]
    page = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    page = page[: page.index("\n\n", page.index("\n|"))]  # its first table
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", page).replace("`", "")
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in plain.splitlines() if line[:2] == "| "]
    assert rows[1:] == [[one[key] for key in ("what", "address", "admits", "encrypted")] for one in found]
    shown = call("doctor", "--read", debian, env={"COLUMNS": "400"}).stdout
    for one in found:
        assert f" {one['admits']} " in shown

"""Machines that are broken in one way each, as recorded facts, and what doctor says of them."""

import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.predict.measure import network
from thinwire.predict.measure.network import gloo_choice, nccl_choice
from thinwire.tools.doctor import Facts, Interface, Name, collect_facts, judge
from thinwire.tools.doctor.collect_facts import cpu_quota

LO = Interface("lo", kind="loopback", addresses=("127.0.0.1", "::1"), mtu=65536)
ETH = Interface("eth0", addresses=("192.0.2.7", "fe80::1"), mbits=10_000, mtu=9000, packets=1_000_000)
HOST = Name("worker", ("192.0.2.7",), ("192.0.2.7",))
HEALTHY = Facts(
    thinwire="0.1.0",
    python="3.12.1",
    torch="2.13.0+cpu",
    cores=8,
    threads=8,
    interfaces=(LO, ETH),
    default_route="eth0",
    hostname=HOST,
    tcp={"tcp_rmem": "4096 131072 33554432", "tcp_wmem": "4096 16384 16777216"},
    segments=1_000_000,
    retransmitted=10,
    open_files=(65536, 65536),
    shm_bytes=8 << 30,
    lab="root",
)
TORCHRUN = {
    "RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "head", "MASTER_PORT": "29500",
}  # fmt: skip
HEAD = Name("head", ("192.0.2.1",))
DEBIAN = Name("worker", ("127.0.1.1",), ("127.0.1.1",))
UNKNOWN = Name("worker", error="Name or service not known")
DOCKER = Interface("docker0", kind="bridge", addresses=("172.17.0.1",))
FAST = Interface("eth1", addresses=("198.51.100.7",), mbits=25_000, mtu=9000)
GPU = {"gpus": ("NVIDIA H100",), "backends": ("gloo", "nccl")}


def eth(**changes):
    return {"interfaces": (LO, replace(ETH, **changes))}


# what is changed in a healthy machine; machines of the job; level and code of each finding; words of its sentences
CASES = {
    "healthy": ({}, None, [], ""),
    "healthy, under torchrun": ({"environment": TORCHRUN, "master": HEAD, "threads": 4}, None, [], ""),
    "a setting that is no number": ({"tcp": {"tcp_rmem": "4096 131072 ¹"}}, None, [], ""),
    "debian's hosts file, one machine": (
        {"hostname": DEBIAN}, None, [("warning", "hostname-loopback")], "GLOO_SOCKET_IFNAME=eth0",
    ),
    "debian's hosts file, two machines": (
        {"hostname": DEBIAN}, 2, [("error", "hostname-loopback")], "listen on 127.0.1.1",
    ),
    "debian's hosts file, two machines by torchrun": (
        {"hostname": DEBIAN, "environment": TORCHRUN, "master": HEAD, "threads": 1}, None,
        [("error", "hostname-loopback")], "GLOO_SOCKET_IFNAME=eth0",
    ),
    "debian's hosts file, but the interface is named": (
        {"hostname": DEBIAN, "environment": {"GLOO_SOCKET_IFNAME": "eth0"}}, 2, [], "",
    ),
    "a name without an address": (
        {"hostname": UNKNOWN}, 2, [("error", "hostname-loopback"), ("warning", "hostname-unknown")],
        "Name or service not known",
    ),
    "a name that is another machine's": (
        {"hostname": Name("worker", ("192.0.2.9",), ())}, 2, [("error", "hostname-loopback")],
        "leads only to other machines (192.0.2.9)",
    ),
    "an interface that is not there": (
        {"environment": {"GLOO_SOCKET_IFNAME": "ens5"}}, None, [("error", "interface-missing")], "'ens5'",
    ),
    "one of two interfaces is not there": (
        {"environment": {"GLOO_SOCKET_IFNAME": "eth0,ens5"}}, None, [("error", "interface-missing")], "eth0",
    ),
    "an interface without an address": (
        {"environment": {"GLOO_SOCKET_IFNAME": "eth0"}, **eth(addresses=())}, None,
        [("error", "interface-missing"), ("warning", "only-loopback")], "has no address",
    ),
    "the loopback by name": (
        {"environment": {"GLOO_SOCKET_IFNAME": "lo"}}, 2, [("error", "loopback-named")], "GLOO_SOCKET_IFNAME=eth0",
    ),
    "no network": (
        {"interfaces": (LO,), "hostname": DEBIAN, "default_route": None}, None, [("warning", "only-loopback")], "",
    ),
    "no network, two machines": (
        {"interfaces": (LO,), "hostname": DEBIAN, "default_route": None}, 2, [("error", "only-loopback")], "",
    ),
    "the interface is down": (
        {"interfaces": (LO, replace(ETH, up=False), FAST), "default_route": "eth1"}, 2,
        [("error", "interface-down"), ("warning", "slower-interface")], "ip link set eth0 up",
    ),
    "docker's bridge": (
        {"interfaces": (LO, ETH, DOCKER), "hostname": Name("worker", ("172.17.0.1",), ("172.17.0.1",))}, 2,
        [("warning", "virtual-interface"), ("note", "not-the-default-route")], "GLOO_SOCKET_IFNAME=eth0",
    ),
    "a faster interface is idle": (
        {"interfaces": (LO, ETH, FAST)}, None, [("warning", "slower-interface")], "GLOO_SOCKET_IFNAME=eth1",
    ),
    "two networks": (
        {"interfaces": (LO, ETH, replace(FAST, mbits=None)), "default_route": "eth1"}, None,
        [("note", "not-the-default-route")], "eth1 leads to the rest",
    ),
    "a dead name server": ({"hostname": replace(HOST, seconds=5.0)}, None, [("warning", "slow-name")], "5.0 s"),
    "IPv6 first": (
        {"hostname": Name("worker", ("2001:db8::7",), ("2001:db8::7",)), **eth(addresses=("192.0.2.7", "2001:db8::7"))},
        None, [("note", "ipv6")], "2001:db8::7",
    ),
    "NCCL and Gloo on two networks": (
        {**GPU, "interfaces": (LO, ETH, replace(FAST, name="ib0"))}, None, [("note", "two-interfaces")], "ib0",
    ),
    "NCCL's interface is not there": (
        {**GPU, "environment": {"NCCL_SOCKET_IFNAME": "=ens5"}}, None, [("error", "interface-missing")],
        "NCCL_SOCKET_IFNAME",
    ),
    "a broken cable": (eth(errors=5000), None, [("warning", "losses")], "5000 errors"),
    "full rings": (eth(drops=20_000), None, [("warning", "losses")], "ethtool -G eth0"),
    "a few packets dropped": (eth(drops=2000), None, [], ""),
    "the network loses packets": ({"retransmitted": 30_000}, None, [("warning", "retransmissions")], "twice"),
    "wireless": (eth(kind="wireless", mbits=None), None, [("warning", "wireless")], "eth0"),
    "100 Mbit/s": (eth(mbits=100, mtu=1500), None, [("warning", "slow-link")], "100 Mbit/s"),
    "small packets": (eth(mtu=1500), None, [("note", "small-packets")], "mtu 9000"),
    "small buffers": (
        {"tcp": {"tcp_rmem": "4096 87380 212992", "tcp_wmem": "4096 16384 212992"}}, None,
        [("note", "small-buffers")], "sysctl -w net.ipv4.tcp_rmem",
    ),
    "half of torchrun's variables": (
        {"environment": {"RANK": "0", "WORLD_SIZE": "2"}}, None, [("error", "variables-missing")], "MASTER_ADDR",
    ),
    "a rank too many": (
        {"environment": {**TORCHRUN, "RANK": "4"}, "master": HEAD, "threads": 1}, None,
        [("error", "variables-wrong")], "at most 3",
    ),
    "a rank that is no number": (
        {"environment": {**TORCHRUN, "RANK": "two"}, "master": HEAD, "threads": 1}, None,
        [("error", "variables-wrong")], "'two'",
    ),
    "a port that is none": (
        {"environment": {**TORCHRUN, "MASTER_PORT": "70000"}, "master": HEAD, "threads": 1}, None,
        [("error", "variables-wrong")], "65535",
    ),
    "a master that nobody knows": (
        {"environment": TORCHRUN, "master": Name("head", error="Name or service not known"), "threads": 1}, None,
        [("error", "master-unknown")], "MASTER_ADDR=head",
    ),
    "the master is oneself": (
        {"environment": {**TORCHRUN, "MASTER_ADDR": "localhost"}, "threads": 1,
         "master": Name("localhost", ("127.0.0.1",), ("127.0.0.1",))}, None,
        [("error", "master-loopback")], "--master-addr",
    ),
    "the master is oneself, on one machine": (
        {"environment": {**TORCHRUN, "MASTER_ADDR": "localhost", "LOCAL_WORLD_SIZE": "4"}, "threads": 1,
         "master": Name("localhost", ("127.0.0.1",), ("127.0.0.1",))}, None, [], "",
    ),
    "a slow name server for the master": (
        {"environment": TORCHRUN, "master": replace(HEAD, seconds=3.0), "threads": 1}, None,
        [("warning", "slow-name")], "MASTER_ADDR=head took 3.0 s",
    ),
    "too many threads": (
        {"environment": TORCHRUN, "master": HEAD, "threads": 8}, None,
        [("warning", "too-many-threads")], "OMP_NUM_THREADS=4",
    ),
    "an old torch": ({"torch": "2.8.1"}, None, [("error", "too-old")], "2.9 or newer"),
    "an old Python": ({"python": "3.9.18"}, None, [("error", "too-old")], "3.10 or newer"),
    "no backend": ({"backends": ()}, None, [("error", "no-backend")], "USE_DISTRIBUTED"),
    "a GPU that torch does not see": ({"gpu_driver": True}, None, [("warning", "gpu-unused")], "pytorch.org"),
    "a GPU that is hidden on purpose": (
        {"gpu_driver": True, "environment": {"CUDA_VISIBLE_DEVICES": ""}}, None, [], "",
    ),
    "a container of two cores": ({"quota": 2.0}, None, [("warning", "quota")], "OMP_NUM_THREADS=2"),
    "few open files": ({"open_files": (256, 4096)}, None, [("warning", "open-files")], "ulimit -n 4096"),
    "docker's /dev/shm": ({"shm_bytes": 64 << 20}, None, [("warning", "shared-memory")], "64 MiB"),
    "Gloo with TLS": (
        {"environment": {"GLOO_DEVICE_TRANSPORT": "TCP_TLS"}}, None, [("note", "gloo-tls")], "are not used",
    ),
    "no rights for the lab": (
        {"lab": "loopback", "lab_reason": "not root"}, None, [("note", "no-lab")], "not root",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_machine_is_judged(case):
    changes, nodes, expected, words = CASES[case]
    diagnosis = judge(replace(HEALTHY, **changes), nodes)
    assert sorted((f.level, f.code) for f in diagnosis.findings) == sorted(expected), diagnosis.findings
    said = " ".join(f"{f.what} {f.remedy}" for f in diagnosis.findings)
    assert words in said
    assert diagnosis.prevents_training == any(level == "error" for level, _ in expected)
    for finding in diagnosis.findings:
        assert finding.what.endswith(".")
        assert "\n" not in finding.what + finding.remedy
        assert "None" not in finding.what + finding.remedy


def test_every_finding_has_a_case_and_a_line_in_the_page():
    root = Path(__file__).parents[3]
    sources = (root / "src/thinwire/tools/doctor").glob("*.py")
    codes = {code for file in sources for code in re.findall(r'(?:ERROR|WARNING|NOTE|on_several\(\)),\s+"([a-z0-9-]+)"',
                                                             file.read_text())}  # fmt: skip
    assert len(codes) > 20
    assert codes == {code for _, _, expected, _ in CASES.values() for _, code in expected}
    page = (root / "docs/commands.md").read_text().partition("### Findings")[2]
    assert codes == set(re.findall(r"^\| `([a-z0-9-]+)` \|", page, re.MULTILINE))


def test_the_worst_comes_first():
    findings = judge(replace(HEALTHY, lab="loopback", backends=(), shm_bytes=1)).findings
    assert [finding.level for finding in findings] == ["error", "warning", "note"]


@pytest.mark.parametrize(
    ("environment", "interfaces", "chosen"),
    [
        ({}, ("lo", "eth0", "docker0"), ["eth0"]),
        ({}, ("lo", "eth0", "ib0", "ib1"), ["ib0", "ib1"]),
        ({}, ("lo", "docker0"), ["docker0"]),
        ({}, ("lo",), ["lo"]),
        ({}, ("lo", "virbr0"), ["lo"]),
        ({"NCCL_SOCKET_IFNAME": "eth"}, ("lo", "eth0", "eth1"), ["eth0", "eth1"]),
        ({"NCCL_SOCKET_IFNAME": "=eth1"}, ("lo", "eth0", "eth1", "eth10"), ["eth1"]),
        ({"NCCL_SOCKET_IFNAME": "^eth0,lo"}, ("lo", "eth0", "eth1"), ["eth1"]),
        ({"NCCL_SOCKET_IFNAME": "^=eth1,lo"}, ("lo", "eth1", "eth10"), ["eth10"]),
        ({"NCCL_SOCKET_IFNAME": "ens"}, ("lo", "eth0"), []),
        ({"NCCL_SOCKET_FAMILY": "AF_INET6"}, ("lo", "eth0", "six0"), ["six0"]),
    ],
)
def test_nccl_takes(environment, interfaces, chosen):
    made = {"lo": LO, "six0": Interface("six0", addresses=("2001:db8::1",))}
    facts = replace(
        HEALTHY,
        environment=environment,
        interfaces=tuple(made.get(name, Interface(name, addresses=("192.0.2.8",))) for name in interfaces),
    )
    choice = nccl_choice(facts)
    assert list(choice.interfaces) == chosen
    assert bool(choice.problem) == (not chosen)


NAMES = st.sampled_from(["lo", "eth0", "eth1", "docker0", "wlan0"])
ADDRESSES = st.lists(st.sampled_from(["127.0.0.1", "127.0.1.1", "192.0.2.7", "::1", "2001:db8::7"]), max_size=3)
KINDS = st.sampled_from(["loopback", "ethernet", "wireless", "bridge", "virtual", "tunnel"])
INTERFACES = st.builds(Interface, name=NAMES, kind=KINDS, addresses=ADDRESSES.map(tuple))  # the rest by its type
HOSTS = st.builds(Name, addresses=ADDRESSES.map(tuple), bound=ADDRESSES.map(tuple), seconds=st.floats(0, 30))
VARIABLES = st.sampled_from([*TORCHRUN, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY"])
FACTS = st.builds(
    Facts,
    interfaces=st.lists(INTERFACES, max_size=4, unique_by=lambda one: one.name).map(tuple),
    default_route=st.none() | NAMES,
    hostname=HOSTS,
    master=st.none() | HOSTS,
    environment=st.dictionaries(VARIABLES, st.text(max_size=6)),
    backends=st.sampled_from([(), ("gloo",), ("gloo", "nccl")]),
    tcp=st.dictionaries(st.sampled_from(["tcp_rmem", "tcp_wmem"]), st.text(max_size=6)),
)


@given(FACTS, st.none() | st.integers(1, 9))
def test_any_machine_can_be_judged_and_facts_survive_json(facts, nodes):
    assert Facts.from_json(facts.to_json()) == facts
    diagnosis = judge(facts, nodes)
    assert all(finding.what and finding.remedy for finding in diagnosis.findings)


def test_this_machine():
    facts = collect_facts("root")
    listed = {name for _, name in socket.if_nameindex()}
    assert {one.name for one in facts.interfaces} == listed
    lo = next(one for one in facts.interfaces if one.kind == "loopback")
    assert lo.up
    assert lo.addresses[0] == "127.0.0.1"
    assert facts.default_route is None or facts.default_route in listed
    assert "gloo" in facts.backends
    assert facts.hostname.name == socket.gethostname()
    assert gloo_choice(facts).address
    assert judge(facts).gloo == gloo_choice(facts)


def test_a_name_without_an_address_is_an_error_in_words():
    found = network.look_up("no-such-machine.invalid")
    assert found.addresses == found.bound == ()
    assert found.error
    assert network.look_up("127.0.0.1").bound == ("127.0.0.1",)
    assert network.look_up("192.0.2.200").bound == ()  # a documentation address, which is nobody's


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_cores_of_a_container(tmp_path, files, cores):
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == cores

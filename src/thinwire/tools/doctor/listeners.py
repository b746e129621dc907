"""The ports that this package opens while it runs: printed by the doctor and shown on the security page."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OpenPort:
    what: str
    address: str
    lasts: str
    admits: str
    encrypted: str


_TLS = "with --keys: TLS 1.3; else no"

LISTENERS = (
    OpenPort(
        "the ranks' own connections (attach on CPUs, up to 16 ranks)",
        "Gloo's interface: GLOO_SOCKET_IFNAME, else where this machine's name leads",
        "while ranks connect, at most 10 s; on a long wire also while a lost socket is replaced",
        "a rank of this job, by a random token of 16 bytes",
        "with THINWIRE_KEYS: TLS 1.3; else no",
    ),
    OpenPort(
        "Gloo, NCCL and torch's store",
        "torch's choice: see the doctor's rows gloo and nccl",
        "the job",
        "whoever reaches them",
        "Gloo with TCP_TLS, if torch was built with it",
    ),
    OpenPort(
        "torchft: its lighthouse, and each replica's manager, store and checkpoint server",
        "all addresses",
        "the training",
        "whoever reaches them; weights are handed out, and what arrives is unpickled",
        "no",
    ),
    OpenPort(
        "a parameter server, and each of its shards",
        "127.0.0.1, or --host with --keys, a secret or --insecure",
        "the training",
        "with keys a certificate of your authority, with a secret whoever knows it, else whoever reaches the port",
        _TLS,
    ),
    OpenPort(
        "a node's leader, for its workers",
        "127.0.0.1",
        "the training",
        "with keys the node's own certificate, with a secret whoever knows it, else any process on this machine",
        _TLS,
    ),
    OpenPort(
        "a split cloud",
        "127.0.0.1, or --listen with --keys or --insecure",
        "the training",
        "with keys a certificate of your authority, else whoever reaches the port",
        _TLS,
    ),
    OpenPort("federated deployments", "Flower's", "the federation", "Flower's rules", "Flower's TLS"),
    OpenPort(
        "thinwire lab",
        "a new network namespace, else the loopback",
        "the run",
        "its ranks, by a secret made for the run",
        "ps run --keys: TLS 1.3; else no",
    ),
    OpenPort("thinwire watch", "127.0.0.1", "until ctrl-C", "any process on this machine, which may only read", "no"),
)

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


_TLS = "TLS 1.3 with certificates on both sides"

LISTENERS = (
    OpenPort(
        "the ranks' own connections (attach on CPUs, up to 16 ranks)",
        "Gloo's interface: GLOO_SOCKET_IFNAME, else what this machine's name leads to",
        "while ranks connect, at most 10 s; on a long wire also while a lost socket is replaced",
        "a rank of this job, by a token of 16 random bytes that is exchanged over Gloo",
        "with THINWIRE_KEYS: TLS 1.3 with certificates on both sides; else no. With GLOO_DEVICE_TRANSPORT=TCP_TLS "
        "alone there are none, and Gloo carries everything",
    ),
    OpenPort(
        "Gloo, NCCL and torch's store",
        "torch's choice: see the doctor's rows gloo and nccl",
        "the job",
        "torch's rules: whoever reaches them",
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
        "a certificate from your authority; or who knows the secret; without either, whoever reaches the port",
        f"with --keys: {_TLS}; else no",
    ),
    OpenPort(
        "a node's leader, for its workers",
        "127.0.0.1",
        "the training",
        "the node's own certificate; or who knows the secret; without either, any process on this machine",
        f"with --keys: {_TLS}; else no",
    ),
    OpenPort(
        "a split cloud",
        "127.0.0.1, or --listen with --keys or --insecure",
        "the training",
        "a certificate from your authority; without --keys, whoever reaches the port",
        f"with --keys: {_TLS}; else no",
    ),
    OpenPort("federated deployments", "Flower's", "the federation", "Flower's rules", "Flower's TLS"),
    OpenPort(
        "thinwire lab",
        "a new network namespace, else the loopback",
        "the run",
        "its ranks; they share a secret that is made for the run",
        f"ps run --keys: {_TLS}; else no",
    ),
    OpenPort("thinwire watch", "127.0.0.1", "until ctrl-C", "any process on this machine, which may only read", "no"),
)

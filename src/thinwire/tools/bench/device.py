"""Where the ranks of the bench compute: on cores, or on this machine's GPUs, which several ranks may share."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from thinwire.core.collectives.groups import backends_to_ask_for

DEVICES = ("cpu", "cuda")


def check_device(name: str) -> None:
    """Raise ``ValueError`` if ranks cannot compute there."""
    if name not in DEVICES:
        raise ValueError(f"--device {name} must be cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU here; see nvidia-smi, and install a torch built for CUDA")
    if name == "cuda" and not dist.is_nccl_available():
        raise ValueError("--device cuda: this torch was built without NCCL, through which ranks exchange on GPUs")


def prepare_rank(name: str) -> str:
    """Call before ``init_process_group``, whose backends are returned. On CPUs a rank has one thread.

    On GPUs ranks take turns at this machine's cards. NCCL refuses two ranks of one host on one card, so ranks that
    share are hosts of their own to it, and their messages go through sockets.
    """
    torch.set_num_threads(1)
    if name == "cpu":
        return "gloo"
    rank, cards = int(os.environ["RANK"]), torch.cuda.device_count()
    if cards < int(os.environ["WORLD_SIZE"]):
        os.environ |= {"NCCL_HOSTID": f"thinwire rank {rank}", "NCCL_NET": "Socket"}
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(rank % cards)
    return backends_to_ask_for(torch.device(name))


def names_of_cards() -> list[str]:
    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]


def place_of(name: str, workers: int) -> str:
    if name == "cpu":
        return ""
    cards = names_of_cards()
    shared = f"{workers} ranks on {len(cards)} " if len(cards) < workers else ""
    return f", {shared}{cards[0]}"


def rank_device(name: str) -> torch.device:
    return torch.device("cpu") if name == "cpu" else torch.device("cuda", torch.cuda.current_device())

"""``thinwire plan``: which method pays for a model on a network, and why, before anything is run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.tools.cli.console import Output
from thinwire.tools.cli.options import JsonOption
from thinwire.tools.cli.verb import argument, option

if TYPE_CHECKING:
    from thinwire.tools.cli.plan_inputs import Question


class PlanOptions(JsonOption):
    """What a prediction is for: a model, a network and the devices."""

    model: str | None = argument(
        None,
        "resnet50, resnet152, densenet201, vgg16, bert-base, bert-large, gpt2; a file from thinwire profile; or a "
        "model of the bench or module:function, which is measured here.",
    )
    link: str | None = option(None, "Rate of each machine's link, such as 1gbit; by default 10gbit.")
    delay: str | None = option(None, "One-way delay between machines, such as 25ms; by default 50us, a start-up.")
    loss: str = option("0%", "Share of packets that get lost, such as 0.1%.")
    congestion: str = option("cubic", "TCP's congestion control: cubic or bbr.", choices=("cubic", "bbr"))
    costs: Path | None = option(None, "Measured costs: a file from thinwire probe or thinwire kfac calibrate.")
    workers: int | None = option(None, "Total number of ranks; by default that of --costs, or 16.", least=1, most=65536)
    batch_size: int | None = option(None, "Samples per rank, for the built-in models.")
    device: str | None = option(
        None, "Assumed rates: cpu, t4, v100, a100 or h100; by default a100 for built-in models, else cpu."
    )
    device_flops: float | None = option(None, "FLOP/s that training sustains, for the built-in models.")
    profile: Path | None = option(None, "The model, as a file from thinwire profile.")

    ranks_per_node: int | None = 1  # this and the next two are options of ``thinwire plan`` alone
    methods: str | None = "ssgd"
    worth: Path | None = None

    def question(self) -> Question:
        from thinwire.tools.cli.plan_inputs import read_question

        return read_question(self)


class PlanVerb(PlanOptions):
    """Predict every method's step on a network and say which one to use, if any.

    Example: thinwire plan resnet50 --link 1gbit --workers 4
    """

    ranks_per_node: int | None = option(None, "Ranks per machine; by default that of --costs, or 1.", least=1)
    methods: str | None = option(
        None, "Separated by commas, such as acp:rank=4,topk:density=0.01; by default all that are known."
    )
    worth: Path | None = option(None, "What a step of each method is worth on your model: a file from thinwire race.")
    lossy: bool = option(True, "Whether lossy methods may be recommended.")
    explain: bool = option(False, "Also show the buckets, and the densities of sparse ones.")
    map: bool = option(False, "Also show the winners over link rates and workers.")
    memory: bool = option(False, "Only count what local steps hold on each GPU and in host memory.")
    shards: int = option(1, "With --memory: ranks of a site, over which FSDP2 cuts the model.")
    sites: int = option(2, "With --memory: how many sites.")
    dtype: str = option("fp32", "With --memory: of the weights: fp32, bf16 or fp16.")
    trace: Path | None = option(None, "Write the best method's timeline to this file, for Perfetto.", writes="file")
    out: Path | None = option(None, "Write the plan to this file: method, buckets, ranking.", writes="file")

    def run(self, output: Output) -> Any:
        alone = ("link", "delay", "costs", "workers", "worth", "profile", "trace", "out", "map", "explain")
        given = self.given(alone if self.memory else ("shards", "sites", "dtype"))
        if given and self.memory:
            raise ValueError(f"--memory only counts: leave out {given}")
        if given:
            raise ValueError(f"{given}: these belong to --memory")
        if self.memory:
            from thinwire.tools.cli.plan_memory import show

            if self.model is None:
                raise ValueError("--memory counts a model: give a built-in name, or module:function")
            return show(self.model, self.methods, output, **self.part(["shards", "sites", "dtype"]))
        from thinwire.tools.cli.plan_answer import answer_of

        try:
            return answer_of(self.question(), self, output)
        except LookupError as error:
            raise ValueError(str(error.args[0] if error.args else error)) from error

"""``thinwire plan``: which method pays for a model on a network, and why, before anything is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thinwire.tools.cli.console import Output
from thinwire.tools.cli.options import PlanOptions
from thinwire.tools.cli.verb import option


class PlanVerb(PlanOptions):
    """Predict every method's step on a network and say which one to use, if any.

    Example: thinwire plan resnet50 --link 1gbit --workers 4
    """

    ranks_per_node: int | None = option(None, "Ranks per machine; by default that of --costs, or 1.", least=1)
    methods: str | None = option(
        None, "Separated by commas, such as acp:rank=4,topk:density=0.01; by default all that are known."
    )
    speeds: str | None = option(
        None, "Speeds of the workers beside the fastest, which is the described one, such as 1,1,0.5,0.5."
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
        alone = ("link", "delay", "costs", "workers", "speeds", "worth", "profile", "trace", "out", "map", "explain")
        given = self.given(alone if self.memory else ("shards", "sites", "dtype"))
        if given and self.memory:
            raise ValueError(f"--memory only counts: leave out {given}")
        if given:
            raise ValueError(f"{given}: these belong to --memory")
        if self.speeds is not None and (given := self.given(("map", "explain"))):
            raise ValueError(f"--speeds ranks machines that differ: leave out {given}")
        if self.memory:
            from thinwire.tools.cli.plan_memory import show

            if self.model is None:
                raise ValueError("--memory counts a model: give a built-in name, or module:function")
            return show(self.model, self.methods, output, **self.part(["shards", "sites", "dtype"]))
        from thinwire.predict.measure.machine import Load
        from thinwire.tools.cli.plan_answer import answer_of
        from thinwire.tools.cli.plan_inputs import read_question

        try:
            question = read_question(self)
            if question.load and Load(**question.load).sentence(1):
                output.line("unreliable: this machine was busy while the model was measured")
            return answer_of(question, output, **self.part(["lossy", "explain", "map", "trace", "out"]))
        except LookupError as error:
            raise ValueError(str(error.args[0] if error.args else error)) from error

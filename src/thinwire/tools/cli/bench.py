"""``thinwire bench``: compare methods on one set of ranks, in turns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thinwire.tools.cli.console import Output, run_ranks, watched_load
from thinwire.tools.cli.options import MODEL, DeviceOption, JsonOption, LabOptions, PlotOption
from thinwire.tools.cli.verb import option

if TYPE_CHECKING:
    from thinwire.tools.bench.session import BenchSpec


class BenchVerb(LabOptions, DeviceOption, PlotOption, JsonOption):
    """Compare methods on one model and one network: step time, exposed communication, bytes, loss.

    Example: thinwire bench --model mlp --link 200mbit --methods ddp,powersgd:rank=4
    """

    model: str = option("chargpt", MODEL)
    methods: str = option(
        "ddp,ddp-best,ssgd,acp,local",
        "Rows: alone, ddp, ddp-best, ddp-fp16, torch-powersgd, ssgd, acp:rank=4, local ...",
    )
    steps: int = option(10, "Timed steps per row in each round.", least=1)
    rounds: int = option(3, "How many turns each row gets.", least=1)
    warmup: int = option(3, "Untimed steps before a row's first turn.", least=0)
    seed: int = option(0, "Seed of the initial weights.")
    timeout: float = option(3600.0, "Seconds after which the whole run is stopped.")
    operation_timeout: float = option(300.0, "Seconds that an exchange may hang before its row fails.")
    predict: bool = option(False, "Also measure the network and the model, and show what the planner predicts.")

    @property
    def spec(self) -> BenchSpec:
        from thinwire.tools.bench.rows import parse_rows
        from thinwire.tools.bench.session import BenchSpec

        times = {"operation_seconds": self.operation_timeout, "timeout_seconds": self.timeout}
        return BenchSpec(**{**self.part(BenchSpec), **self.wire, **times, "rows": parse_rows(self.methods)})

    def run(self, output: Output) -> Any:
        from thinwire.tools.bench.device import check_device
        from thinwire.tools.bench.models.registry import check_model
        from thinwire.tools.bench.summary import bench_picture, bench_table, summarise
        from thinwire.tools.pictures import write_picture

        spec = self.spec
        check_device(self.device)
        check_model(self.model)
        total = (len(spec.rows) + 1) * (self.warmup + self.rounds * self.steps + self.rounds - 1)
        with watched_load(self.workers) as load:
            record, launched = run_ranks(spec, self.cluster, total_steps=total)
        result = summarise(spec, record, emulated=launched.emulated, note=launched.note)
        if self.plot is not None:
            write_picture(bench_picture(result), self.plot)
        output.say(bench_table(result))
        output.code = int(all(row.error for row in result.rows[1:]))
        return load.with_load(result)

"""SplitFed: fronts are averaged over clients (``thinwire.federated``), one back learns from all (``thinwire.split``).

Paper: Thapa et al.: SplitFed: When Federated Learning Meets Split Learning, AAAI 2022 (arXiv 2004.12088), section 3,
SFLV2: the server's part is trained by the clients' batches one client after another, only the clients' parts are
averaged.

Round: every client gets the averaged front, trains it and the back on its own samples across the cut, and answers with
the change of its front; the server adds the mean of the changes, weighted by samples.

Differences from the paper: what crosses the cut goes through codecs; AdamW instead of SGD, new at the edges in every
round, while the cloud keeps its moments; clients come in a fixed order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from thinwire.split import ByteLedger, CloudEnd, EdgeEnd, Recipe
from thinwire.split.ends import counted
from thinwire.split.finetune import evaluate
from thinwire.split.tasks import Task, TextData
from torch import Tensor, nn

from thinwire import federated as fl


@dataclass(kw_only=True)
class SplitFed(fl.FedAvg):
    """FedAvg of fronts whose clients train across the cut; ``context.model`` is a ``Front``.

    Args:
        cloud: the one back, its optimizer and its codecs' state per client.
        recipe: of both ends. ``epochs`` passes over a client's samples in every round.
        rounds: in all: the learning rate rises and falls over all of a client's rounds.

    Attributes:
        ledger: what crossed the cut in training, both ways, frames included.
    """

    cloud: CloudEnd
    recipe: Recipe
    rounds: int
    ledger: ByteLedger = field(default_factory=ByteLedger)

    def train(
        self, context: fl.ClientContext, payload: Mapping[str, Tensor], state: Mapping[str, Tensor] | None
    ) -> fl.ClientResult:
        """One client's epochs, as an edge of its own; its answer is the change of the front."""
        data: TextData = context.data
        per_round = self.recipe.steps(len(data))
        edge = EdgeEnd(
            context.model,
            self.cloud.pair,
            self.recipe,
            total=self.rounds * per_round,
            name=f"client-{context.client}",
            steps=context.round * per_round,
        )
        edge.open(counted(self.cloud.handle, self.ledger), self.cloud.hello(edge.hello()))
        first = context.round * self.recipe.epochs
        losses = [
            float(edge.step(data.batch(indices)))
            for epoch in range(first, first + self.recipe.epochs)
            for indices in self.recipe.batches(len(data), epoch)
        ]
        edge.bye()
        return fl.ClientResult(
            {"delta": context.x - payload["theta"]}, metrics={"loss": sum(losses) / len(losses), "last": losses[-1]}
        )

    def score(self, front: nn.Module, task: Task) -> float:
        """The task's metric on its held-out samples, of a front and the back as it is."""
        edge = EdgeEnd(front, self.cloud.pair, self.recipe, total=1, name="judge")
        edge.open(self.cloud.handle, self.cloud.hello(edge.hello()))
        score = task.score(evaluate(edge, task.held_out, self.recipe.batch_size))
        edge.bye()
        return score

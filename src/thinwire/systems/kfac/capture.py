"""Hooks that see the layers' inputs and output gradients, and note when a statistic is complete.

From the second round on, a statistic is complete when its layer has been called as often as in the round before, so its
exchange may begin during the pass. Statistics that are still incomplete are completed at the end of backward.

Inputs are taken before the layer runs (later in-place operations may overwrite them), gradients by a hook on the output
tensor, because torch rejects full-backward hooks of modules together with in-place activations.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.core.checks import check_choice
from thinwire.core.program.ops import own_modes
from thinwire.engine.backward_hooks import BackwardEnd
from thinwire.engine.hooks import current_task
from thinwire.predict.measure.kernels import Stopwatch
from thinwire.systems.kfac.factors import LayerSums
from thinwire.systems.kfac.layers import Preconditioned

logger = logging.getLogger("thinwire")

A, G = 0, 1
"""The two sides of a layer."""
_MEASURED = 1  # the round that is timed; the first is slower


class _Calls:
    """How often one side of one layer was called in the last pass of a round, and how many calls are expected."""

    def __init__(self) -> None:
        self.count, self.expected = 0, -1  # -1: unknown
        self.rounds = 0
        self.steady, self.complete, self.warned = True, False, False

    def begin(self) -> None:
        if self.rounds > 1 and self.count != self.expected:
            self.steady = False
        self.expected = self.count if self.rounds else -1
        self.rounds, self.count, self.complete = self.rounds + 1, 0, False


class PassListener(Protocol):
    """Who is asked what is wanted, and told what is complete."""

    def due(self) -> bool: ...
    def last_pass(self) -> bool: ...
    def loss_scale(self) -> Tensor | None: ...
    def begin_round(self) -> None: ...
    def complete(self, layer: int, side: int) -> None: ...
    def end_round(self) -> None: ...


class Capture:
    """The hooks of one model; ``watched``: for each layer, whether this rank needs its statistics."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Preconditioned],
        watched: Sequence[bool],
        scaling: str,
        tokens: str,
        *,
        sampled: bool,  # take gradients in ``sample``, not those of the loss
        listener: PassListener,
    ) -> None:
        self._layers, self._sampled, self._listener = layers, sampled, listener
        self.sums = [LayerSums(layer, scaling, tokens) for layer in layers]
        self._calls = [(_Calls(), _Calls()) for _ in layers]
        self.open = False
        self.rounds = 0
        self.seconds = 0.0  # spent on statistics, by the host's clock
        self._outputs: list[Tensor] = []
        self._sampling = False
        self._end = BackwardEnd(self._backward_over)
        self.watch = Stopwatch(layers[0].weight.device)
        self.marks: list[tuple[int, int, Any, Any]] = []  # layer, side, begin and end of the measured round
        self._handles: list[Any] = [model.register_forward_pre_hook(self._forward_begins)]
        for index, layer in enumerate(layers):
            if not watched[index]:
                continue
            self._handles.append(layer.module.register_forward_pre_hook(partial(self._input, index), with_kwargs=True))
            self._handles.append(layer.module.register_forward_hook(partial(self._output, index)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._outputs.clear()

    def _wanted(self, module: nn.Module) -> bool:
        """Return whether this forward counts: in training, due, and not repeated by checkpointing inside backward."""
        return module.training and torch.is_grad_enabled() and current_task() == -1 and self._listener.due()

    def _forward_begins(self, model: nn.Module, args: Any) -> None:
        self._end.outside()  # an exception during backward leaves a mark
        if self.open and self._wanted(model):
            self._new_pass()

    def _new_pass(self) -> None:
        self._outputs.clear()
        for sums in self.sums:
            sums.new_pass()

    def _input(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._wanted(module):
            return
        if not self.open:
            self._begin()
        x = args[0] if args else next(iter(kwargs.values()))
        self._take(index, A, lambda sums: sums.add_input(x))

    def _output(self, index: int, module: nn.Module, args: Any, output: Tensor) -> None:
        if not (self.open and self._wanted(module) and output.requires_grad):
            return
        if self._sampled:
            self._outputs.append(output)
        output.register_hook(partial(self._gradient, index))

    def _gradient(self, index: int, g: Tensor) -> None:
        if not self.open:
            return
        if not self._sampling:
            self._end.note()
        if self._sampling == self._sampled:
            scale = None if self._sampling else self._listener.loss_scale()
            self._take(index, G, lambda sums: sums.add_gradient(g, scale, sampled=self._sampling))

    def _take(self, index: int, side: int, add: Any) -> None:
        calls, last = self._calls[index][side], self._listener.last_pass()
        if calls.complete:  # its exchange has already begun
            calls.count += 1
            calls.steady = False
            if not calls.warned:
                calls.warned = True
                logger.warning(
                    "thinwire: %s was called more often in this pass than before, after its factor had been sent: the "
                    "extra calls are left out this once, and from now on its factor is sent at the end of backward",
                    self._layers[index].name,
                )
            return
        began, begin = time.perf_counter(), self.watch.mark()
        with own_modes(), torch.no_grad():  # in the working dtype, whatever autocast the forward is in
            add(self.sums[index])
        end = self.watch.mark()
        self.seconds += time.perf_counter() - began
        if self.rounds == _MEASURED and last:
            self.marks.append((index, side, begin, end))
        if last:
            calls.count += 1
            if calls.steady and calls.count == calls.expected:
                calls.complete = True
                self._listener.complete(index, side)

    @property
    def blind(self) -> bool:
        """Whether there is a layer to watch, and no call of any was ever seen."""
        return len(self._handles) > 1 and self._calls[0][A].rounds == 0

    @property
    def measured(self) -> bool:
        return self.rounds > _MEASURED

    def statistic(self, layer: int, side: int) -> Tensor:
        return self.sums[layer].statistic(side)

    def _begin(self) -> None:
        self._listener.begin_round()
        self.open = True
        for sums, both in zip(self.sums, self._calls):
            sums.clear()
            for calls in both:
                calls.begin()

    def _backward_over(self) -> None:
        if not self.open:
            return
        self._new_pass()
        if self._listener.last_pass():
            self.close()

    def close(self) -> None:
        """Complete all remaining statistics, and end the round."""
        if not self.open:
            return
        self.open = False
        self._outputs.clear()
        self._listener.end_round()
        self.rounds += 1

    def sample(self, loss: Tensor) -> None:
        """Take the statistics G from the gradient of a loss on sampled targets; ``.grad`` and its hooks see nothing."""
        outputs, self._outputs = self._outputs, []
        if not outputs:
            return
        self._sampling = True
        try:
            torch.autograd.grad(loss, outputs, retain_graph=True, allow_unused=True)
        finally:
            self._sampling = False


def sampled_loss(outputs: Tensor, distribution: str, generator: torch.Generator | None = None) -> Tensor:
    """Return the mean negative log-likelihood of targets sampled from the model (Martens and Grosse 2015, section 5).

    "categorical": logits, classes last, ``[..., classes]``; the mean is over all other dimensions. "gaussian": means
    with unit variance, ``[B, ...]``; half the squared error, summed over each example, mean over examples.
    """
    check_choice("distribution", distribution, ("categorical", "gaussian"))
    if distribution == "categorical":
        logits = outputs.flatten(0, -2)
        logits = logits.float() if outputs.dtype.itemsize < 4 else logits
        probabilities = logits.detach().softmax(-1)
        targets = torch.multinomial(probabilities, 1, generator=generator).squeeze(1)
        return F.cross_entropy(logits, targets)
    noise = torch.empty_like(outputs).normal_(generator=generator)
    return 0.5 * (outputs - (outputs.detach() + noise)).square().sum() / outputs.shape[0]

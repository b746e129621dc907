"""Put a bucket's tensors into one matrix, each from a row of its own, so that one operation works on all of them.

What belongs to a tensor (a scale, the bytes of its codes) starts anew with each tensor, so no value depends on the
plan. The last row of a tensor is padded with zeros, which are not sent, unless they are few.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.core.kernels.seeding import fill_noise, upload
from thinwire.core.methods.base import accumulate_all, all_finite
from thinwire.core.program import AllGather, Bucket, Slot, State, working_dtype
from thinwire.core.program.bucket import deliver

_FEW = 0.01
"""Share of padding up to which it is sent: that costs less than two copies."""


class Rows:
    def __init__(self, slots: Sequence[Slot], width: int) -> None:
        self.slots = [slot for slot in slots if slot.numel]
        self.width = width
        self._rows = [-(-slot.numel // width) for slot in self.slots]
        self.count = sum(self._rows)
        padding = self.count * width - sum(slot.numel for slot in self.slots)
        self._sends_padding = padding <= _FEW * self.count * width
        self._tiles: dict[int, Tensor] = {}

    @classmethod
    def of(cls, bucket: Bucket, width: int) -> Rows:
        """Return the rows of a bucket; made once for each bucket and width."""
        if width not in bucket.memo:
            bucket.memo[width] = cls(bucket.slots, width)
        found = bucket.memo[width]
        assert isinstance(found, Rows)
        return found

    @functools.cached_property
    def sizes(self) -> Tensor:
        return upload(torch.tensor([slot.numel for slot in self.slots]), self.slots[0].device)

    @functools.cached_property
    def owner(self) -> Tensor:
        """For each row, the place in ``slots`` of its tensor, int32 [count]."""
        device = self.slots[0].device
        if device.type == "meta":
            return torch.empty(self.count, dtype=torch.int32, device=device)
        rows = upload(torch.tensor(self._rows, dtype=torch.int32), device)
        return torch.repeat_interleave(rows, output_size=self.count)

    def tiles(self, size: int) -> Tensor:
        """Return where in the matrix each tile of at most ``size`` elements of one tensor begins, and where it ends.

        Then, for each tensor and for the end, the number of tiles before: int64 [2 tiles + T + 1]. Made once.
        """
        if size not in self._tiles:
            begins: list[Tensor] = []
            ends: list[Tensor] = []
            last, first = [0], 0
            for slot, rows in zip(self.slots, self._rows):
                begins.append(torch.arange(first, first + slot.numel, size))
                ends.append((begins[-1] + size).clamp(max=first + slot.numel))
                last.append(last[-1] + len(ends[-1]))
                first += rows * self.width
            self._tiles[size] = upload(torch.cat([*begins, *ends, torch.tensor(last)]), self.slots[0].device)
        return self._tiles[size]

    def cut(self, x: Tensor) -> list[Tensor]:
        each = x.shape[-1] // self.count
        parts = x.split([rows * each for rows in self._rows], -1)
        return [part[..., : self._own(slot, each)] for slot, part in zip(self.slots, parts)]

    def sent(self, x: Tensor) -> list[Tensor]:
        """Return what is sent of the rows of ``x``, 1-D."""
        return [x] if self._sends_whole(x.numel() // self.count) else self.cut(x)

    def spread(self, x: Tensor, each: int) -> Tensor:
        """Undo ``sent`` for rows of ``each`` bytes: turn the concatenated parts into whole rows again, [.., bytes]."""
        if self._sends_whole(each):
            return x
        own = [self._own(slot, each) for slot in self.slots]
        zeros = x.new_zeros((*x.shape[:-1], each))
        parts = [zeros[..., :0]]
        for part, rows in zip(x.split(own, -1), self._rows):
            parts += [part, zeros[..., : rows * each - part.shape[-1]]]
        return torch.cat(parts, -1)

    def gather(self, scales: Tensor, codes: Tensor, state: State) -> Generator[Any, Tensor, tuple[Tensor, ...]]:
        """All-gather scales and the rows' codes, 1-D, in one message; the scales say whether the step is finite.

        Returns the ranks' scales and codes, ``[P, ...]`` and ``[P, bytes]``, and that verdict.
        """
        everyone = yield AllGather(torch.cat([scales.view(-1).view(torch.uint8), *self.sent(codes)]))
        head = everyone[:, : scales.nbytes].reshape(-1).view(scales.dtype).view(-1, *scales.shape)
        finite = all_finite(head)
        state.verdict(finite)
        return head, self.spread(everyone[:, scales.nbytes :], codes.numel() // self.count), finite

    def gradients(self) -> Tensor:
        """Return all gradients, [count * width], working dtype, unscaled: a new tensor."""
        first = self.slots[0]
        x = torch.empty(self.count * self.width, dtype=working_dtype(first.dtype), device=first.device)
        if x.device.type == "meta":
            return x
        self._clear(x)
        torch._foreach_copy_(self._shaped(x), [slot.value_or_zeros() for slot in self.slots])
        return x if first.scale is None else x.div_(first.scale)

    def accumulate(self, state: State) -> Tensor:
        x = state.spare(self.slots, size=self.count * self.width)
        if x.device.type != "meta":
            self._clear(x)
            accumulate_all(self.slots, state, self._shaped(x))
        return x

    def stage(self, state: State, residual: Tensor) -> None:
        for slot, piece in zip(self.slots, self._shaped(residual)):
            state.stage(slot.name, residual=piece)

    def noise(self, seed: int, state: State) -> Tensor:
        """Return an int16 number for each element, drawn from the seed, its tensor's name, the step and the rank.

        There is any number in the padding.
        """
        device = self.slots[0].device
        x = torch.empty(self.count * self.width, dtype=torch.int16, device=device)
        if device.type != "meta":
            parts = [part[: slot.numel + -slot.numel % 4] for slot, part in zip(self.slots, self._whole(x))]
            fill_noise(parts, [(seed, slot.name, state.step, state.rank) for slot in self.slots])
        return x

    def write(self, x: Tensor) -> None:
        scale = self.slots[0].scale
        deliver(self.slots, self._shaped(x if scale is None else x * scale))

    def _sends_whole(self, each: int) -> bool:
        return self._sends_padding or each == 1

    def _own(self, slot: Slot, each: int) -> int:
        return -(-slot.numel * each // self.width)

    def _whole(self, x: Tensor) -> list[Tensor]:
        return list(x.split([rows * self.width for rows in self._rows]))

    def _shaped(self, x: Tensor) -> list[Tensor]:
        return [part.view(slot.shape) for slot, part in zip(self.slots, self.cut(x))]

    def _clear(self, x: Tensor) -> None:
        gaps = [part[slot.numel :] for slot, part in zip(self.slots, self._whole(x)) if part.numel() > slot.numel]
        if gaps:
            torch._foreach_zero_(gaps)

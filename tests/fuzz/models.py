"""Models of a script: blocks on rows of ``WIDTH`` numbers, with parameters and buffers of every kind."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, ROWS = 12, 5
DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "bfloat16", "float16", "float8_e4m3fn", "uint8", "bool", "int32", "int64")
}
SHAPES = {"scalar": (), "empty": (0, 3), "row": (1, 8), "column": (8, 1), "cube": (3, 2, 5), "long": (37,)}


class Failure(RuntimeError):
    """What a script raises in the middle of its own loop."""


class Raises(torch.autograd.Function):
    """Raises in the middle of a backward, while ``armed``."""

    armed = False

    @staticmethod
    def forward(ctx, x, anchor):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if Raises.armed:
            raise Failure("in backward")
        return grad, None


class Cast(nn.Module):
    """A layer in a dtype of its own."""

    def __init__(self, inner, dtype, grad_dtype=None):
        super().__init__()
        self.inner, self.dtype, self.grad_dtype = inner.to(dtype), dtype, grad_dtype
        self.take_grads_in()

    def take_grads_in(self):
        if self.grad_dtype is not None:
            for p in self.inner.parameters():
                p.grad_dtype = self.grad_dtype

    def forward(self, x):
        return self.inner(x.to(self.dtype)).to(x.dtype)


class Odd(nn.Module):
    """Parameters of odd shapes; one may be laid out backwards."""

    def __init__(self, shapes):
        super().__init__()
        for name in shapes:
            self.register_parameter(name, nn.Parameter(0.3 * torch.randn(SHAPES[name])))
        self.turned = nn.Parameter((0.3 * torch.randn(4, WIDTH)).t())

    def forward(self, x):
        for p in self.parameters():
            x = x + 0.1 * p.sin().mean() if p.numel() else x + p.sum()
        return x + 0.1 * torch.tanh(x @ self.turned) @ self.turned.t()


class Image(nn.Module):
    """A convolution, its weight in channels_last."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.conv(x.view(-1, 3, 2, 2)).reshape(x.shape)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)

    def forward(self, x):
        return x + self.embedding((x[:, 0].detach().float().abs() * 10).long() % 7).to(x.dtype)


class Tied(nn.Module):
    """Uses another layer's weight too, the other way round."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x @ self.weight.to(x.dtype)


class Rarely(nn.Module):
    """A layer that not every pass uses: "none", "rank 1" or "odd" passes."""

    def __init__(self, when):
        super().__init__()
        self.when, self.inner, self.now = when, nn.Linear(WIDTH, WIDTH), (0, 0)

    def forward(self, x):
        rank, number = self.now
        used = {"none": False, "rank 1": rank == 1, "odd": number % 2 == 1}[self.when]
        return x + 0.2 * torch.tanh(self.inner(x)) if used else x.clone()  # FSDP2 warns of views


class Buffers(nn.Module):
    """Buffers that a training forward changes in one of several ways, and constants; in the order given.

    Each is "<dtype> <how>": in place, rebind, constant, mask (-inf), expanded, big (a counter above 2**53), flag.
    """

    def __init__(self, kinds):
        super().__init__()
        self.kinds = kinds
        for i, kind in enumerate(kinds):
            name, how = kind.split(" ", 1)
            value = (4 * torch.rand(3)).to(DTYPES[name])
            if how == "mask":
                value = torch.tensor([0.0, -torch.inf, 0.0]).to(DTYPES[name])
            elif how == "expanded":
                value = torch.rand(1).to(DTYPES[name]).expand(4)
            elif how == "big":
                value = torch.tensor(2**60 + int(value[0]))
            elif how == "flag":
                value = torch.zeros((), dtype=DTYPES[name])
            self.register_buffer(f"b{i}", value)

    @torch.no_grad()
    def change(self, x):
        for i, kind in enumerate(self.kinds):
            how, b = kind.split(" ", 1)[1], getattr(self, f"b{i}")
            if how == "flag":
                b.fill_(1)
            elif how == "big":
                b.add_(1)
            elif how in ("in place", "rebind"):
                if b.is_floating_point():
                    new = (0.5 * b.float() + x.float().mean() + 0.3).to(b.dtype)  # so that no rounding hides a change
                elif b.dtype is torch.bool:
                    new = torch.cat([~b[:1], x[0, 1:3] > 0])
                else:
                    new = (b + (x[0, :3] * 10).long().abs() + 1).to(b.dtype)
                if how == "rebind":
                    setattr(self, f"b{i}", new)
                else:
                    b.copy_(new)

    def forward(self, x):
        if self.training:
            self.change(x.detach())
        return x


class Noted(nn.Linear):
    """Keeps a state that is no tensor."""

    def get_extra_state(self):
        return {"words": ["a", "b"], "rate": 0.5, "shape": (1, 2)}

    def set_extra_state(self, state):
        assert state == self.get_extra_state()


class Net(nn.Module):
    def __init__(self, spec, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.blocks, linear = nn.ModuleList(), None
        self.spec = spec["blocks"]
        for block in self.spec:
            kind = block["kind"]
            if kind == "tied":
                made = Tied(linear.weight) if linear is not None else nn.Linear(WIDTH, WIDTH)
            elif kind in ("linear", "frozen", "noted"):
                made = (Noted if kind == "noted" else nn.Linear)(WIDTH, WIDTH, bias=block.get("bias", True))
                linear = made if kind == "linear" and "dtype" not in block and linear is None else linear
            else:
                made = {
                    "odd": lambda b: Odd(b["shapes"]),
                    "image": lambda b: Image(),
                    "words": lambda b: Words(),
                    "rarely": lambda b: Rarely(b["when"]),
                    "buffers": lambda b: Buffers(b["kinds"]),
                    "norm": lambda b: nn.BatchNorm1d(WIDTH),
                    "layernorm": lambda b: nn.LayerNorm(WIDTH),
                    "dropout": lambda b: nn.Dropout(0.2),
                }[kind](block)
            if kind == "frozen":
                made.requires_grad_(False)
            if "dtype" in block:
                made = Cast(made, DTYPES[block["dtype"]], DTYPES.get(block.get("grad_dtype")))
            self.blocks.append(made)
        self.last = nn.Linear(WIDTH, 3)
        if spec.get("dtype", "float32") != "float32":
            self.to(DTYPES[spec["dtype"]])

    def forward(self, x):
        for place, (block, made) in enumerate(zip(self.spec, self.blocks)):
            for _ in range(block.get("times", 1)):
                if block.get("again") and self.training and torch.is_grad_enabled():
                    y = checkpoint(made, x, use_reentrant=False)
                else:
                    y = made(x)
                plain = block["kind"] in ("linear", "frozen", "noted", "tied", "image")
                x = x + 0.5 * torch.tanh(y).to(x.dtype) if plain else y
            if place == len(self.spec) // 2:
                x = Raises.apply(x, torch.zeros((), requires_grad=True))
        return self.last(x) if self.spec else Raises.apply(self.last(x), torch.zeros((), requires_grad=True))


def build(spec, seed):
    return Net(spec, seed)


def note_pass(net, rank, number):
    """Tell the model which pass this is, for what not every pass uses."""
    for module in net.modules():
        if isinstance(module, Rarely):
            module.now = rank, number


def loss_of(net, case, rank, number):
    """The loss of a pass; equal wherever it is computed, dropout included."""
    draw = torch.Generator().manual_seed(100_000 * case["seed"] % 2**31 + 2 * number + rank)
    dtype = DTYPES[case["model"].get("dtype", "float32")]
    x, y = torch.randn(ROWS, WIDTH, generator=draw).to(dtype), torch.randn(ROWS, 3, generator=draw)
    note_pass(net, rank, number)
    torch.manual_seed(7 * number + rank)
    return (net(x).float() - y).square().mean()

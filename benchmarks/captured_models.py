"""Training steps of small models in plain torch, from which benchmark programs are made; sizes of two kinds."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from datasets import dlrm, gpt

Step = Callable[[], object]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> Step:
    """A step of forward, backward and optimizer."""

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


class Residual(nn.Module):
    """Two convolutions with batch norms and a way around them."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(out) for _ in range(3))
        self.around = nn.Conv2d(into, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.one(x)))
        return F.relu(self.norms[1](self.two(y)) + self.norms[2](self.around(x)))


def resnet(*, tiny: bool = False) -> Step:
    """A residual network on small images, SGD with momentum."""
    width, batch, side = (4, 2, 16) if tiny else (32, 16, 32)
    blocks = [Residual(width << at, width << (at + 1), 2) for at in range(3)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width * 8, 10)]
    stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    model = nn.Sequential(*stem, *blocks, *head)
    images, labels = torch.randn(batch, 3, 2 * side, 2 * side), torch.randint(0, 10, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return train(model, optimizer, lambda: F.cross_entropy(model(images), labels))


def encoder(*, tiny: bool = False) -> Step:
    """Layers of a BERT with padded sequences, post-norm and dropout, and a fused AdamW."""
    width, length, layers, batch = (16, 8, 1, 2) if tiny else (192, 64, 4, 8)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, activation="gelu", batch_first=True)
    tokens = nn.Embedding(1000, width)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    head = nn.Linear(width, 1000)
    ids, labels = torch.randint(0, 1000, (batch, length)), torch.randint(0, 1000, (batch, length))
    padded = torch.arange(length).expand(batch, -1) >= torch.randint(length // 2, length + 1, (batch, 1))
    modules = nn.ModuleList([tokens, model, head])
    optimizer = torch.optim.AdamW(modules.parameters(), lr=1e-4, fused=True)

    def loss() -> Tensor:
        return F.cross_entropy(head(model(tokens(ids), src_key_padding_mask=padded)).flatten(0, 1), labels.flatten())

    return train(modules, optimizer, loss)


def lstm(*, tiny: bool = False) -> Step:
    """Two layers of an LSTM that predict the next word, with clipped gradients and Adam over lists of tensors."""
    width, length, batch = (8, 4, 2) if tiny else (128, 32, 16)
    words, cells, head = nn.Embedding(500, width), nn.LSTM(width, width, 2, batch_first=True), nn.Linear(width, 500)
    modules = nn.ModuleList([words, cells, head])
    ids = torch.randint(0, 500, (batch, length + 1))
    optimizer = torch.optim.Adam(modules.parameters(), lr=1e-3, foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        logits = head(cells(words(ids[:, :-1]))[0])
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(modules.parameters(), 1.0)
        optimizer.step()

    return step


def recommender(*, tiny: bool = False) -> Step:
    """A DLRM of one process; its tables have sparse gradients."""
    tables = 2 if tiny else 8
    rows, batch = (100, 8) if tiny else (100_000, 512)
    config = dlrm.DlrmConfig(batch=batch, rows=(rows,) * tables, dims=(32,) * tables, pooling=(10,) * tables)
    return dlrm.single(config, torch.randn(tables * rows * 32))


def _config(*, tiny: bool) -> gpt.GptConfig:
    if tiny:
        return gpt.GptConfig(layers=1, hidden=32, heads=2, vocab=96, seq=16, batch=2)
    return gpt.GptConfig(layers=4, hidden=192, heads=4, vocab=1000, seq=64, batch=8)


def transformer(*, tiny: bool = False) -> Step:
    """A GPT of one process."""
    return gpt.single(_config(tiny=tiny))


def data_parallel(*, tiny: bool = False) -> Step:
    """The GPT on all ranks, gradients averaged by DDP."""
    return gpt.data_parallel(_config(tiny=tiny))


def tensor_parallel(*, tiny: bool = False) -> Step:
    """The GPT's layers split over all ranks."""
    return gpt.tensor_parallel(_config(tiny=tiny))


ALONE = {"gpt": transformer, "resnet": resnet, "dlrm": recommender, "encoder": encoder, "lstm": lstm}
ON_TWO = {"ddp": data_parallel, "tp": tensor_parallel}

"""Handwritten digits and a small vision transformer: plain torch, nothing about checkpoints."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

HELD_OUT = 297
"""Digits kept for evaluation; the other 1500 are for training."""


class VisionTransformer(nn.Module):
    """Classify 8 x 8 grey images, given as ``(batch, 8, 8)`` floats, into ten digits."""

    def __init__(self, width: int = 64, depth: int = 2, heads: int = 4, patch: int = 4) -> None:
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(patch * patch, width)
        self.position = nn.Parameter(0.3 * torch.randn(1, (8 // patch) ** 2, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 2 * width, 0.1, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape ``(batch, 10)``."""
        size = self.patch
        patches = images.unfold(1, size, size).unfold(2, size, size)
        tokens = self.embed(patches.reshape(len(images), -1, size * size)) + self.position
        for block in self.blocks:
            tokens = block(tokens)
        logits: Tensor = self.head(self.norm(tokens).mean(dim=1))
        return logits


def read_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images and labels, then held-out images and labels, always in the same order."""
    data = load_digits()
    images = torch.tensor(data.images / 6.0 - 0.8, dtype=torch.float32)  # mean about 0, deviation about 1
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, held_out = order[HELD_OUT:], order[:HELD_OUT]
    return images[train], labels[train], images[held_out], labels[held_out]

"""Small models of every kind that the planner has to do with. Their activations outweigh their weights by far."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def perceptron(width: int, layers: int, inputs: int, outputs: int) -> nn.Sequential:
    """Linear layers with tanh between them; on ``[m, points, inputs]`` it treats every point alike."""
    widths = [inputs, *[width] * (layers - 1)]
    body = [module for size in widths for module in (nn.Linear(size, width), nn.Tanh())]
    return nn.Sequential(*body, nn.Linear(width, outputs))


class Residual(nn.Module):
    """A norm and a narrow perceptron, added to the stream."""

    def __init__(self, width: int, factor: int = 2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.body = nn.Sequential(nn.Linear(width, factor * width), nn.GELU(), nn.Linear(factor * width, width))

    def forward(self, stream: Tensor) -> Tensor:
        out: Tensor = stream + self.body(self.norm(stream))
        return out


class ResidualPerceptron(nn.Module):
    """Many residual blocks one after the other."""

    def __init__(self, inputs: int, width: int, layers: int, outputs: int) -> None:
        super().__init__()
        self.stem = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(layers))
        self.head = nn.Linear(width, outputs)

    def forward(self, points: Tensor) -> Tensor:
        stream = self.stem(points)
        for block in self.blocks:
            stream = block(stream)
        out: Tensor = self.head(stream)
        return out


class ConvBlock(nn.Module):
    """Two convolutions, each with a norm, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, norm: str, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm_first, self.norm_second = (
            nn.BatchNorm2d(outputs) if norm == "batch" else nn.GroupNorm(2, outputs) for _ in range(2)
        )
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride) if stride > 1 or inputs != outputs else None

    def forward(self, images: Tensor) -> Tensor:
        kept = images if self.shortcut is None else self.shortcut(images)
        hidden = F.relu(self.norm_first(self.first(images)))
        return F.relu(self.norm_second(self.second(hidden)) + kept)


class ConvNet(nn.Module):
    """A small residual network on images ``[m, channels, side, side]``."""

    def __init__(self, norm: str, widths: Sequence[int] = (12, 24, 48), channels: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, widths[0], 3, padding=1)
        before = [widths[0], *widths[:-1]]
        self.blocks = nn.ModuleList(
            ConvBlock(inputs, outputs, norm, stride=1 if index == 0 else 2)
            for index, (inputs, outputs) in enumerate(zip(before, widths, strict=True))
        )
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        stream = self.stem(images)
        for block in self.blocks:
            stream = block(stream)
        out: Tensor = self.head(stream.mean(dim=(2, 3)))
        return out


class Attention(nn.Module):
    """Self-attention with a fused projection, causal if asked, with an optional mask ``[m, 1, 1, time]``."""

    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.project_in, self.project_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, stream: Tensor, mask: Tensor | None = None) -> Tensor:
        rows, time, width = stream.shape
        parts = self.project_in(stream).view(rows, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=self.causal)
        out: Tensor = self.dropout(self.project_out(mixed.transpose(1, 2).reshape(rows, time, width)))
        return out


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, *, causal: bool = True, dropout: float = 0.0, factor: int = 4) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal, dropout=dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, factor * width), nn.GELU(), nn.Linear(factor * width, width), nn.Dropout(dropout)
        )

    def forward(self, stream: Tensor, mask: Tensor | None = None) -> Tensor:
        stream = stream + self.attention(self.norm_attention(stream), mask)
        out: Tensor = stream + self.mlp(self.norm_mlp(stream))
        return out


class PlainAttention(nn.Module):
    """Attention that writes its weights ``[m, time, time]`` out, and adds to the stream: quadratic in time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.query, self.key, self.value = nn.LayerNorm(width), *(nn.Linear(width, width) for _ in range(3))

    def forward(self, stream: Tensor) -> Tensor:
        normed = self.norm(stream)
        weights = torch.softmax(self.query(normed) @ self.key(normed).transpose(1, 2), dim=-1)
        out: Tensor = stream + weights @ self.value(normed)
        return out


class Mixing(nn.Module):
    """A convolution over time, added to the stream."""

    def __init__(self, width: int, reach: int = 5) -> None:
        super().__init__()
        self.mix = nn.Conv1d(width, width, reach, padding=reach // 2)

    def forward(self, stream: Tensor) -> Tensor:
        return stream + F.silu(self.mix(stream.transpose(1, 2)).transpose(1, 2))


class LanguageModel(nn.Module):
    """Tokens ``[m, time]`` to logits ``[m, time, vocabulary]`` through given blocks; the embedding can be the head."""

    def __init__(self, blocks: Sequence[nn.Module], width: int, vocabulary: int, time: int, *, tied: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(time, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        stream = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            stream = block(stream) if mask is None else block(stream, mask)
        out: Tensor = self.head(self.norm(stream))
        return out


class TokenEncoder(nn.Module):
    """``nn.TransformerEncoder`` over tokens."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout, batch_first=True)
        self.tokens = nn.Embedding(vocabulary, width)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(self.tokens(tokens)))
        return out


class Recurrent(nn.Module):
    """A recurrent network over tokens: ``nn.LSTM`` or ``nn.GRU``."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.body = kind(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.tokens(tokens))[0])
        return out


class Experts(nn.Module):
    """A mixture of experts: every token goes to the one that its router prefers, which depends on the data."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, stream: Tensor) -> Tensor:
        tokens = stream.flatten(0, 1)
        weights = torch.softmax(self.router(tokens), dim=-1)
        chosen = weights.argmax(dim=-1)
        out = tokens
        for index, expert in enumerate(self.experts):
            mine = (chosen == index).nonzero().squeeze(1)
            given = expert(tokens.index_select(0, mine)) * weights.index_select(0, mine)[:, index : index + 1]
            out = out.index_add(0, mine, given)
        return out.view_as(stream)


class UNet(nn.Module):
    """Down and up again with skips, which stay alive over the whole way."""

    def __init__(self, widths: Sequence[int] = (8, 16, 32)) -> None:
        super().__init__()
        before = [1, *widths[:-1]]
        self.down = nn.ModuleList(ConvBlock(i, o, "group") for i, o in zip(before, widths, strict=True))
        self.middle = ConvBlock(widths[-1], widths[-1], "group")
        after = [*reversed(widths[:-1]), widths[0]]
        wide = list(reversed(widths))
        inputs = [below + skip for below, skip in zip([widths[-1], *after[:-1]], wide, strict=True)]
        self.up = nn.ModuleList(ConvBlock(i, o, "group") for i, o in zip(inputs, after, strict=True))
        self.head = nn.Conv2d(widths[0], 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            images = block(images)
            skips.append(images)
            images = F.max_pool2d(images, 2)
        images = self.middle(images)
        for block in self.up:
            images = block(torch.cat([F.interpolate(images, scale_factor=2), skips.pop()], dim=1))
        out: Tensor = self.head(images)
        return out


class VisionTransformer(nn.Module):
    """Patches of an image, a class token, transformer blocks."""

    def __init__(self, side: int, patch: int, width: int, layers: int, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(Block(width, 4, causal=False) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        stream = torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1) + self.places
        for block in self.blocks:
            stream = block(stream)
        out: Tensor = self.head(self.norm(stream[:, 0]))
        return out


class TwoEncoders(nn.Module):
    """An encoder for images and one for texts; their product scores each pair, so no pair sees another."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.images = ConvNet("group", widths=(8, 16), classes=vocabulary)
        self.texts = LanguageModel([Block(width, 2, causal=False) for _ in range(2)], width, vocabulary, 32, tied=False)
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        left = F.normalize(self.images(images), dim=-1)
        right = F.normalize(self.texts(texts).mean(dim=1), dim=-1)
        return (left * right).sum(dim=-1) * self.scale.exp()


class Heads(nn.Module):
    """A trunk on points and three wide heads."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.trunk = ResidualPerceptron(8, width, 4, width)
        self.heads = nn.ModuleDict({name: perceptron(width, 3, width, outputs) for name in ("a", "b", "c")})

    def forward(self, points: Tensor) -> Any:
        raise NotImplementedError("the loss function calls the trunk and the heads")

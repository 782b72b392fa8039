"""A small byte-level transformer language model in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256
_BYTES_SEEN_AT_ONCE = 4


class Block(nn.Module):
    """Causal attention, then a perceptron, each on a normalised input and added to the stream of some width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.perceptron_norm = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, stream: Tensor) -> Tensor:
        """Maps ``[batch, time, width]`` to the same shape."""
        batch, time, width = stream.shape
        projected = self.query_key_value(self.attention_norm(stream))
        query, key, value = projected.view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        stream = stream + self.attention_out(attended.transpose(1, 2).reshape(batch, time, width))
        added: Tensor = self.perceptron(self.perceptron_norm(stream))
        return stream + added


class ByteTransformer(nn.Module):
    """Predicts the next byte at every position, of ``context`` at most.

    Each position embeds its own byte and the three before it, so that the first layer need not spend updates on
    learning to look one byte back.

    Example:
        >>> ByteTransformer(context=8, width=16, layers=1, heads=2)(torch.zeros(3, 8, dtype=torch.long)).shape
        torch.Size([3, 8, 256])
    """

    def __init__(self, *, context: int = 128, width: int = 64, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.context = context
        self.bytes = nn.ModuleList(nn.Embedding(VOCABULARY, width) for _ in range(_BYTES_SEEN_AT_ONCE))
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        for back, table in enumerate(self.bytes):
            nn.init.normal_(table.get_parameter("weight"), std=1 / (back + 1))
        nn.init.normal_(self.positions.weight, std=0.3)
        # Small, so that the first prediction is close to even and no update is spent on unlearning it.
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Maps bytes ``[batch, time]`` (integers below 256) to logits ``[batch, time, 256]``."""
        time = text.shape[1]
        stream = self.positions.weight[:time]
        for back, table in enumerate(self.bytes):
            stream = stream + table(F.pad(text, (back, 0))[:, :time])
        for block in self.blocks:
            stream = block(stream)
        logits: Tensor = self.head(self.norm(stream))
        return logits


def make_model(seed: int) -> ByteTransformer:
    """Makes the model of the demonstration; torch's random state is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ByteTransformer()


def next_byte_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean cross-entropy of the next byte, in nats per byte."""
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


@torch.no_grad()
def write_text(model: ByteTransformer, prompt: str, *, length: int, seed: int, temperature: float = 0.7) -> str:
    """Lets the model continue a prompt, byte by byte; below a temperature of 1, likely bytes become likelier."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.tensor([list(prompt.encode())])
    for _ in range(length):
        logits = model(text[:, -model.context :])[:, -1] / temperature
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        text = torch.cat([text, drawn], dim=1)
    decoded = bytes(text[0].tolist()).decode("utf-8", errors="replace")
    # Bytes that a model draws could be control sequences, which would reach the terminal.
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in decoded)

#!/usr/bin/env python3
"""Writes docs/plan.svg and docs/doctor.svg: what `anybatch plan` and `anybatch doctor` print in a terminal.

.venv/bin/python scripts/write_terminal.py [plan] [doctor]
"""

import os
import re
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).parents[1]
FAULTY = "f02_group_forgotten.py"
COLUMNS = 92
PLAIN_LOOP = """\
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
vocabulary, width = 2048, 128
model = nn.Sequential(
    nn.Embedding(vocabulary, width),
    *(nn.TransformerEncoderLayer(width, 4, 512, dropout=0.0, batch_first=True) for _ in range(4)),
    nn.Linear(width, vocabulary),
)
optimizer = torch.optim.AdamW(model.parameters())
data = torch.randint(vocabulary, (320, 65))

for rows in data.split(64):
    optimizer.zero_grad()
    scores = model(rows[:, :-1])
    loss = F.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    optimizer.step()
"""


def printed(arguments: list[str], folder: Path) -> tuple[str, str]:
    """What the command writes to standard output and error, with colours."""
    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(ROOT / "src")
    command = [sys.executable, "-m", "anybatch", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


def draw(name: str, command: str, shown: str) -> None:
    """Draws a terminal into docs/NAME.svg."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    console.print(f"$ {command}\n", highlight=False)
    console.print(Text.from_ansi(shown))
    drawn = console.export_svg(title=f"anybatch {name}", theme=MONOKAI, unique_id=name)
    drawn = re.sub(r"@font-face \{.*?\}\s*|<!--.*?-->\s*", "", drawn, flags=re.DOTALL)  # nothing from the network
    (ROOT / "docs" / f"{name}.svg").write_text(drawn, encoding="utf-8")


def doctor() -> None:
    """The doctor about one of the faulty programs."""
    _, said = printed(["doctor", FAULTY], ROOT / "benchmarks" / "doctor" / "faulty")
    said = said[said.index("\x1b[1;31m") :]  # without what was said while it ran
    draw("doctor", f"anybatch doctor {FAULTY}", said[: said.index("\x1b[2mThe doctor took")].rstrip())  # nor its time


def plan() -> None:
    """A plan for a loop that knows nothing of anybatch, up to the table of its blocks."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(PLAIN_LOOP, encoding="utf-8")
        said, _ = printed(["plan", "train.py", "--memory", "48MiB"], Path(folder))
    draw("plan", "anybatch plan train.py --memory 48MiB", re.split(r"\S*The blocks that hold", said)[0].rstrip())


if __name__ == "__main__":
    for name in sys.argv[1:] or ("plan", "doctor"):
        {"plan": plan, "doctor": doctor}[name]()

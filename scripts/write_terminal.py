#!/usr/bin/env python3
"""Writes docs/doctor.svg: what `anybatch doctor` prints in a terminal about one of the faulty programs.

.venv/bin/python scripts/write_terminal.py
"""

import os
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).parents[1]
PROGRAM = "f02_group_forgotten.py"
COLUMNS = 92


def main() -> int:
    """Runs the program under the doctor and draws what it prints."""
    command = [sys.executable, "-m", "anybatch", "doctor", PROGRAM]
    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "OMP_NUM_THREADS": "1"}
    folder = ROOT / "benchmarks" / "doctor" / "faulty"
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    shown = done.stderr[done.stderr.index("\x1b[1;31m") :]  # without what was said while it ran
    shown = shown[: shown.index("\x1b[2mThe doctor took")].rstrip()  # and without the time, which changes
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    console.print(f"$ anybatch doctor {PROGRAM}\n", highlight=False)
    console.print(Text.from_ansi(shown))
    drawn = console.export_svg(title="anybatch doctor", theme=MONOKAI, unique_id="doctor")
    drawn = re.sub(r"@font-face \{.*?\}\s*|<!--.*?-->\s*", "", drawn, flags=re.DOTALL)  # nothing from the network
    (ROOT / "docs" / "doctor.svg").write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Keeps ``torch.compile`` from compiling the doctor."""

import os
import sys
from pathlib import Path


def stay_uncompiled() -> None:
    """Makes torch's compiler, if it has been loaded, skip the functions of this folder.

    Where a compiled function calls one, such as a hook on an optimizer step, they would be compiled again for each
    tensor that they read.
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")
    folder = f"{Path(__file__).parent}{os.sep}"
    if rules is not None and folder not in rules.SKIP_DIRS:
        rules.add(__package__)

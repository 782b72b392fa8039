"""The doctor runs as it is, also where ``torch.compile`` compiles what calls it."""

import os
import sys
from pathlib import Path


def stay_uncompiled() -> None:
    """Tells torch's compiler, once it has been loaded, to leave the functions of this folder as they are.

    It would compile them where a compiled function calls one, such as a hook on the step of an optimizer: again for
    each tensor that they look at, since they were not written to be traced.
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")
    folder = f"{Path(__file__).parent}{os.sep}"
    if rules is not None and folder not in rules.SKIP_DIRS:
        rules.add(__package__)

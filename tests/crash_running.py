"""Runs a script that crashes, and has the crash explained."""

from pathlib import Path
from typing import Any

from anybatch import Doctor
from anybatch.doctor.crashes import explain
from anybatch.records.events import Crashed
from crash_scripts import graphs, others

SCRIPTS = {**graphs.SCRIPTS, **others.SCRIPTS}


def crash(folder: Path, text: str, *, recorded: bool = False) -> tuple[Crashed, list[str]]:
    """Runs a text as a script; returns what is said of its error, and its lines."""
    path = folder / "train.py"
    path.write_text(graphs.HEAD + text, encoding="utf-8")
    cleanup: list[Any] = []
    names = {"__name__": "__main__", "__file__": str(path), "CLEANUP": cleanup}
    doctor = Doctor() if recorded else None
    try:
        if doctor is not None:
            doctor.attach()
        exec(compile(graphs.HEAD + text, str(path), "exec"), names)
    except Exception as error:  # noqa: BLE001 - whatever the script raises
        crashed = explain(error, doctor)
    else:
        raise AssertionError("the script did not crash")
    finally:
        if doctor is not None:
            doctor.close()
        for one in cleanup:
            one()
    assert crashed is not None
    return crashed, (graphs.HEAD + text).splitlines()

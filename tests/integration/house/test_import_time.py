"""What a first ``import anybatch.backward`` loads beside torch: the way without a plan, and nothing else."""

import subprocess
import sys

CODE = """
import sys, time, torch, anybatch
before = time.process_time()
anybatch.{name}
took = time.process_time() - before
print(took, *sorted(name for name in sys.modules if name.partition(".")[0] == "anybatch"))
"""


def loaded_by(name: str) -> tuple[float, list[str]]:
    """Returns the seconds of CPU time and the modules of anybatch that a public name loads in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", CODE.format(name=name)], capture_output=True, text=True, check=True)
    took, *modules = done.stdout.split()
    return float(took), modules


def test_backward_loads_few_modules() -> None:
    took, modules = loaded_by("backward")
    assert len(modules) <= 50, modules
    assert took < 0.5  # 0.08 s on an idle machine; torch itself takes seconds


def test_a_step_without_a_plan_loads_neither_planning_nor_ranks_nor_the_doctor() -> None:
    _, modules = loaded_by("TrainStep")
    folders = {name.split(".")[1] for name in modules if "." in name}
    assert folders.isdisjoint({"planning", "parallel", "memory", "doctor", "report", "integrations", "cli"}), folders

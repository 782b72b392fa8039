"""The files that CI systems read: the GitHub Action and the pre-commit hook, each run as its host runs it."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from doctor_scripts import environment
from source_tree import PACKAGE, ROOT

yaml = pytest.importorskip("yaml")
jsonschema = pytest.importorskip("jsonschema")

# What GitHub's documentation has of composite actions: metadata-syntax-for-github-actions.
ACTION = {
    "type": "object",
    "required": ["name", "description", "runs"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "description": {"type": "string", "maxLength": 125},
        "branding": {"type": "object", "required": ["icon", "color"]},
        "inputs": {
            "type": "object",
            "patternProperties": {
                "^[a-zA-Z_][a-zA-Z0-9_-]*$": {
                    "type": "object",
                    "required": ["description"],
                    "additionalProperties": False,
                    "properties": {
                        "description": {"type": "string"},
                        "required": {"type": "boolean"},
                        "default": {"type": "string"},
                    },
                }
            },
            "additionalProperties": False,
        },
        "runs": {
            "type": "object",
            "required": ["using", "steps"],
            "additionalProperties": False,
            "properties": {
                "using": {"const": "composite"},
                "steps": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["run", "shell"],
                        "additionalProperties": False,
                        "properties": {
                            "name": {"type": "string"},
                            "if": {"type": "string"},
                            "shell": {"enum": ["bash", "sh", "pwsh", "python"]},
                            "run": {"type": "string"},
                            "env": {"type": "object", "additionalProperties": {"type": "string"}},
                        },
                    },
                },
            },
        },
    },
}
# What pre-commit's documentation has of hooks: pre-commit.com, "Creating new hooks".
HOOKS = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["id", "name", "entry", "language"],
        "additionalProperties": False,
        "properties": {
            "id": {"type": "string"},
            "name": {"type": "string"},
            "description": {"type": "string"},
            "entry": {"type": "string"},
            "language": {"enum": ["python", "system"]},
            "types": {"type": "array", "items": {"type": "string"}},
            "pass_filenames": {"type": "boolean"},
            "require_serial": {"type": "boolean"},
        },
    },
}
TRAIN = """
import torch
body, head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
model = torch.nn.Sequential(body, torch.nn.Tanh(), head)
optimizer = torch.optim.SGD(body.parameters(), lr=0.1)
while True:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    optimizer.step()
"""


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    (tmp_path / "bin").mkdir()
    for name, line in (("python", '"$@"'), ("anybatch", '-m anybatch "$@"')):
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} {line}\n", encoding="utf-8")
        path.chmod(0o755)
    return tmp_path


def shell(folder: Path, command: list[str], **more: str) -> "subprocess.CompletedProcess[str]":
    own = environment(PACKAGE.parent) | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"} | more
    return subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, timeout=240, check=False)


def test_the_action_is_one() -> None:
    action = read("action.yml")
    jsonschema.validate(action, ACTION)
    text = (ROOT / "action.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"inputs\.([\w-]+)", text)) == set(action["inputs"])
    assert not re.search(r"run:.*\$\{\{", text)  # what a pull request names is no code of the shell


def test_the_action_annotates_and_fails(folder: Path) -> None:
    action = read("action.yml")
    step = action["runs"]["steps"][1]
    given = {"script": "train.py", "steps": "30"}
    values = {name: given.get(name, one.get("default", "")) for name, one in action["inputs"].items()}
    env = {name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda match: values[match[1]], text)
           for name, text in step["env"].items()}  # fmt: skip
    done = shell(folder, ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", step["run"]], **env)
    assert done.returncode == 1, done.stderr
    assert "::error file=train.py,line=5,col=1,title=AB101 OPT_PARAM_MISSING::" in done.stdout
    results = json.loads((folder / "anybatch.sarif").read_text(encoding="utf-8"))["runs"][0]["results"]
    assert [one["ruleId"] for one in results] == ["AB101"]


def test_the_hook_is_one_and_fails(folder: Path) -> None:
    hooks = read(".pre-commit-hooks.yaml")
    jsonschema.validate(hooks, HOOKS)
    done = shell(folder, [*shlex.split(hooks[0]["entry"]), "--no-ask", "train.py"])
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("train.py:5:1: error AB101 ")
    assert done.stdout == ""

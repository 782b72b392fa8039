"""The engine on the test accelerator, in a process of its own: what is registered with torch stays there."""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache

import pytest
from torch.utils._device import _device_constructors

import versions
from source_tree import PACKAGE, ROOT

TYPES = "cuda|xpu|mps|mtia|hip"
NAMED = re.compile(rf"torch\.(?:\w+\.)*(?:{TYPES})\b.*|.*\.is_(?:{TYPES})|.*\.type [!=]= '(?:{TYPES})'", re.DOTALL)
IN_TEXT = re.compile(rf"(?:{TYPES})(?::\d+)?|.*\btorch\.(?:\w+\.)*(?:{TYPES})\b.*", re.DOTALL)
EXEMPT = {
    "accelerators.py": "the one file",
    "doctor/crashing/misuses.py": "methods that move tensors",
    "doctor/following.py": "methods that move tensors",
    "planning/devices.py": "cards of a table, which are not here",
}
FACTORIES = {one.__name__ for one in _device_constructors()}
NOT_ENGINE = ("doctor/", "demo/", "integrations/")  # which run where no default device is seen, or as a user's script


@pytest.mark.skipif(shutil.which("g++") is None, reason="the test accelerator is built by g++")
@versions.device_allocators
@pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_engine_keeps_its_promises_there(marked: str) -> None:
    files = [f"tests/accelerator/{name}.py" for name in ("engine", "plans")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked, *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@cache
def nodes() -> list[tuple[str, ast.AST]]:
    """What may name a type in the sources, or make a tensor, without what only documents."""
    return list(_nodes())


def _nodes() -> Iterator[tuple[str, ast.AST]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        texts, name = set[int](), path.relative_to(PACKAGE).as_posix()
        for one in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):  # each before what it consists of
            if isinstance(one, ast.Expr):
                texts.add(id(one.value))
            elif isinstance(one, ast.Constant | ast.Attribute | ast.Compare | ast.Call) and id(one) not in texts:
                yield name, one


def names_a_type(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and IN_TEXT.fullmatch(node.value) is not None
    return isinstance(node, ast.Attribute | ast.Compare) and NAMED.fullmatch(ast.unparse(node)) is not None


def is_homeless(node: ast.AST) -> bool:
    """Whether a tensor is made on the default device, which may be any."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in FACTORIES:
        return False
    return ast.unparse(node.func.value) == "torch" and not {one.arg for one in node.keywords} & {"device", None}


def test_only_one_file_names_a_type_of_accelerator() -> None:
    found = [f"{file}:{node.lineno}" for file, node in nodes() if file not in EXEMPT and names_a_type(node)]  # type: ignore[attr-defined]
    assert not found, found


def test_the_engine_makes_no_tensor_on_the_default_device_of_the_user() -> None:
    found = [
        f"{file}:{node.lineno}"  # type: ignore[attr-defined]
        for file, node in nodes() if not file.startswith(NOT_ENGINE) and is_homeless(node)
    ]  # fmt: skip
    assert not found, found


@pytest.mark.parametrize(
    "line",
    ["torch.cuda.synchronize()", "torch.backends.cuda.flash_sdp_enabled", "getattr(torch, 'xpu')", "x.is_mps",
     "f'torch.cuda.{name}'", "device.type == 'mps'", "torch.device('cuda:0')"],
)  # fmt: skip
def test_a_type_of_accelerator_is_seen(line: str) -> None:
    assert any(names_a_type(node) for node in ast.walk(ast.parse(line)))
    assert is_homeless(ast.parse("torch.zeros(3)", mode="eval").body)

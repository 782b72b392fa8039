"""Private names of torch: without any of them anybatch is imported, and what needs one says which."""

import functools
import importlib.util
import re
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from anybatch import torch_private
from anybatch.errors import AnyBatchError


def looked_up_again() -> ModuleType:
    """The module as an interpreter would load it now."""
    spec = importlib.util.spec_from_file_location("looked_up_again", str(torch_private.__file__))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def delete(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *owners, name = path.split(".")
    owner = torch
    for each in owners:
        owner = getattr(owner, each)
    monkeypatch.delattr(owner, name)


HERE = sorted(path for path in torch_private.LOST if "_cuda_" not in path or torch.cuda.is_available())
"""Builds without CUDA lack its names."""


@pytest.mark.parametrize("path", HERE)
def test_a_name_that_is_gone_is_replaced_or_told(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name for name, value in vars(torch_private).items() if value is found(path)}
    assert names, f"{path} is looked up under no name"
    delete(path, monkeypatch)
    module = looked_up_again()
    for name in names:
        other = getattr(module, name)
        arguments = () if name.startswith(("function", "number", "in_", "is_", "without")) else (torch.ones(2),)
        if isinstance(other, functools.partial):
            with pytest.raises(AnyBatchError, match=re.escape(f"has no torch.{path}, without which")) as caught:
                other(*arguments)
            assert torch_private.LOST[path] in str(caught.value)
        else:
            other(*arguments)


def found(path: str) -> object:
    owner: object = torch
    for each in path.split("."):
        owner = getattr(owner, each)
    return owner


def test_with_all_that_can_be_borne_replaced_a_gradient_is_the_same() -> None:
    """Not deleted from torch, which uses some of them itself."""
    code = """
import functools
import torch
looked_up = functools.reduce
def gone(function, path, owner):
    if owner is torch and path[-1] != "_current_graph_task_id":
        raise AttributeError(path)
    return looked_up(function, path, owner)
functools.reduce = gone
from anybatch import torch_private
functools.reduce = looked_up
assert torch_private.number_of_modes is not torch._C._len_torch_dispatch_stack
import anybatch
model, x = torch.nn.Linear(3, 1), torch.randn(22, 3)
loss = lambda model, batch: model(batch).pow(2).mean()
loss(model, x).backward()
whole = model.weight.grad.clone()
model.zero_grad()
anybatch.backward(model, loss, x, micro_batch_size=8)
assert torch.allclose(model.weight.grad, whole)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr

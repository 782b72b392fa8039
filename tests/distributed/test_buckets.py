"""The memory in which gradients travel between processes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from anybatch.parallel.buckets import ready_to_sum


def test_memory_of_buckets_is_given_back_while_another_thread_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[torch.Tensor] = []

    def all_reduce(tensor: torch.Tensor, group: Any = None) -> None:
        tensor.mul_(2)
        sent.append(tensor)  # as gloo's thread does until it has told that it is done

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 5)]
    for param in parameters:
        param.grad = torch.ones_like(param)
    ready_to_sum(parameters, None, lambda error: error)([True, True], 1.0)
    assert [param.grad.tolist() for param in parameters if param.grad is not None] == [[2.0] * 3, [2.0] * 5]
    assert [tensor.untyped_storage().nbytes() for tensor in sent] == [0]


def test_a_gradient_that_is_sent_as_it_is_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: tensor.mul_(2))
    param = torch.nn.Parameter(torch.zeros(3))
    param.grad = torch.ones(3)
    ready_to_sum([param], None, lambda error: error)([True], 1.0)
    assert param.grad.tolist() == [2.0] * 3

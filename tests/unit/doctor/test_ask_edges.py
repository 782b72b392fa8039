"""Edges of a batch of graphs that were left with the numbers of each graph are told, and others are not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from test_doctor_ask import answer, nothing_was_compiled

__all__ = ["nothing_was_compiled"]

GRAPHS = 6


class Net(nn.Module):
    def __init__(self, *, scatters: bool) -> None:
        super().__init__()
        self.own, self.near, self.scatters = nn.Linear(4, 8), nn.Linear(4, 8), scatters

    def forward(self, x: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        source, to = edges
        zeros, sent = torch.zeros_like(x), x[source]
        got = zeros.scatter_add(0, to[:, None].expand_as(sent), sent) if self.scatters else zeros.index_add(0, to, sent)
        h = (self.own(x) + self.near(got)).relu()
        pooled: torch.Tensor = h.new_zeros(GRAPHS, 8).index_add_(0, graph, h)
        return pooled


def train(offset: bool, scatters: bool = False, least: int = 5, edges: int = 3) -> None:
    """A training on graphs of different sizes with random edges, some of them without any."""
    net = Net(scatters=scatters)
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(4):
        sizes = torch.randint(least, 8, (GRAPHS,)).tolist()
        begins = [sum(sizes[:number]) if offset else 0 for number in range(GRAPHS)]
        several = [begin + torch.randint(0, size, (2, edges * size)) for begin, size in zip(begins, sizes, strict=True)]
        graph = torch.arange(GRAPHS).repeat_interleave(torch.tensor(sizes))
        optimizer.zero_grad()
        F.cross_entropy(net(torch.randn(sum(sizes), 4), torch.cat(several, 1), graph), graph.unique()).backward()
        optimizer.step()


@pytest.mark.parametrize("scatters", [False, True])
def test_edges_between_the_first_nodes_only_are_told(scatters: bool) -> None:
    assert answer(lambda: train(offset=False, scatters=scatters), "edges") == "yes"
    assert answer(lambda: train(offset=True, scatters=scatters), "edges") == "no"


def test_graphs_of_one_node_have_no_other_numbers() -> None:
    assert answer(lambda: train(offset=True, least=1, edges=1), "edges") == "no"


def single() -> None:
    """One graph, whose nodes have classes."""
    net, x = nn.Linear(4, GRAPHS), torch.randn(40, 4)
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(4):
        source, to = torch.randint(0, 10, (2, 80))  # the others have no edges
        optimizer.zero_grad()
        got = torch.zeros_like(x).index_add(0, to, x[source])
        F.cross_entropy(net(x + got), torch.arange(40) % GRAPHS).backward()
        optimizer.step()


def test_one_graph_is_no_batch() -> None:
    assert answer(single, "edges") == "unknown"

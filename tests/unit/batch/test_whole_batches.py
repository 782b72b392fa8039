"""Batches that can't be cut run whole, and are refused only where a cut is asked for.

What would be wrong in silence: a window whose batches are weighed by something else than their samples.
"""

import itertools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
import reference
from anybatch import AnyBatchWarning, BatchError, DoesNotFit
from anybatch.batch.batches import Splittable
from anybatch.batch.moving import moved


class Graphs:
    """A batch of graphs: a row for each node, a label for each graph."""

    def __init__(self, seed: int, graphs: int = 4) -> None:
        generator = torch.Generator().manual_seed(seed)
        sizes = [2 + k % 3 for k in range(graphs)]
        self.x = torch.randn(sum(sizes), 4, generator=generator, dtype=torch.float64)
        self.graph = torch.repeat_interleave(torch.arange(graphs), torch.tensor(sizes))
        self.y = torch.randint(3, (graphs,), generator=generator)

    def __len__(self) -> int:
        return len(self.y)


def graph_loss(model: Any, batch: Any) -> Any:
    pooled = torch.zeros(len(batch.y), 3, dtype=torch.float64).index_add(0, batch.graph, model(batch.x))
    return F.cross_entropy(pooled, batch.y)


def flat_pixels() -> dict[str, Any]:
    """Images of several sizes, their rows one after the other."""
    sizes = torch.tensor([3, 1, 4, 2])
    return {"rows": torch.randn(10, 4).double(), "sizes": sizes, "y": torch.randint(3, (4,))}


def pixel_loss(model: Any, batch: Any) -> Any:
    pooled = torch.stack([model(rows).mean(0) for rows in batch["rows"].split(batch["sizes"].tolist())])
    return F.cross_entropy(pooled, batch["y"])


def packed_row() -> dict[str, Any]:
    """Three sequences in one row, with the places where they begin."""
    return {
        "x": torch.randn(1, 10, 4).double(), "cu_seqlens": torch.tensor([0, 3, 7, 10]), "y": torch.randint(3, (1, 10)),
    }  # fmt: skip


def packed_loss(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def flat_ids() -> dict[str, Any]:
    """Ids of several categories, with the offset of each sample."""
    return {"ids": torch.randint(4, (11,)), "offsets": torch.tensor([0, 2, 7]), "y": torch.randn(3, 3).double()}


def bag_loss(model: Any, batch: Any) -> Any:
    return F.mse_loss(F.embedding_bag(batch["ids"], model.weight.t(), batch["offsets"], mode="sum"), batch["y"])


class Own:
    """A class of the user's own, which is not looked into."""

    def __init__(self) -> None:
        self.x, self.y = torch.randn(5, 4).double(), torch.randint(3, (5,))


def number_loss(model: Any, number: int) -> Any:
    return model(torch.full((2, 4), float(number), dtype=torch.float64)).square().mean()


CASES: dict[str, tuple[Any, Any]] = {
    "a batch of graphs": (Graphs(0), graph_loss),
    "flat pixels": (flat_pixels(), pixel_loss),
    "a packed row": (packed_row(), packed_loss),
    "ids and offsets": (flat_ids(), bag_loss),
    "a class of one's own": (Own(), lambda model, batch: F.cross_entropy(model(batch.x), batch.y)),
    "a number": (3, number_loss),
}


def model_of() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(4, 3).double()


@pytest.mark.parametrize("name", CASES)
def test_it_runs_whole(name: str) -> None:
    batch, loss_fn = CASES[name]
    model = model_of()
    expected, losses = reference.whole_gradients(model, loss_fn, batch)
    reference.clear(model)
    out = anybatch.backward(model, loss_fn, batch)
    reference.assert_float64(reference.gradients_of(model), expected)
    assert out.micro_batches == 1
    assert out.loss == pytest.approx(losses["loss"])


@pytest.mark.parametrize("memory", [None, "64MiB"])
@pytest.mark.parametrize("name", CASES)
def test_a_step_of_it_is_the_plain_one(name: str, memory: Any) -> None:
    batch, loss_fn = CASES[name]
    model, plain = model_of(), model_of()
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), memory=memory)
    for _ in range(2):
        step(batch)
        loss_fn(plain, batch).backward()
        with torch.no_grad():
            for parameter in plain.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.1 * parameter.grad)
                    parameter.grad = None
    reference.assert_float64(list(model.parameters()), list(plain.parameters()))
    assert step.evaluate(batch).loss == pytest.approx(loss_fn(plain, batch).item())


@pytest.mark.parametrize("name", CASES)
def test_a_cut_that_is_asked_for_is_refused_with_the_ways_out(name: str) -> None:
    batch, loss_fn = CASES[name]
    model = model_of()
    with pytest.raises(
        BatchError, match=r"collate_fn=list\).*collate=.*Without micro_batch_size=2 the batch runs whole"
    ):
        anybatch.backward(model, loss_fn, batch, micro_batch_size=2)
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), micro_batch_size=2)
    with pytest.raises(BatchError, match="runs whole"):
        step(batch)
    with pytest.raises(BatchError, match="collate_fn=list"):
        anybatch.check(model, loss_fn, batch)


def test_what_to_do_with_a_class_of_ones_own_is_said() -> None:
    for batch, loss_fn in ((Own(), CASES["a class of one's own"][1]), ({"own": Own(), "z": torch.ones(5)}, graph_loss)):
        with pytest.raises(BatchError, match=r"make a class of your own a dataclass or a dict .*register_pytree_node"):
            anybatch.backward(model_of(), loss_fn, batch, micro_batch_size=2)


def graphs_in_window() -> Any:
    (window,) = anybatch.windows([Graphs(0, 4), Graphs(1, 2), Graphs(2, 3)], batches=3)
    return window


def joined(model: Any, window: Any) -> list[Any]:
    """The gradient of all graphs of a window together."""
    reference.clear(model)
    total = sum(len(batch) for batch in window)
    sum(graph_loss(model, batch) * len(batch) / total for batch in window).backward()
    return reference.gradients_of(model)


def test_a_loader_is_to_be_iterated_over() -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4, 3)), batch_size=2)
    model = nn.Linear(3, 1)
    step = anybatch.TrainStep(
        model, lambda model, batch: model(batch[0]).mean(), torch.optim.SGD(model.parameters(), 0.1), micro_batch_size=2
    )
    with pytest.raises(BatchError, match="the batch is a DataLoader; iterate over it, as in: for"):
        step(loader)


def only_x(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(batch["x"]).square().mean()
    return loss


BATCHES = [{"x": torch.randn(rows, 3), "y": torch.zeros(rows)} for rows in (4, 4, 2)]


@pytest.mark.parametrize("memory", [None, "1GiB"])
@pytest.mark.parametrize("given", [lambda: iter(BATCHES), lambda: (one for one in BATCHES)])
@pytest.mark.filterwarnings("ignore::anybatch.AnyBatchWarning")
def test_what_can_be_gone_through_once_is_to_be_iterated_over(given: Any, memory: str | None) -> None:
    model = nn.Linear(3, 1)
    step = anybatch.TrainStep(model, only_x, torch.optim.SGD(model.parameters(), 0.1), memory=memory)
    with pytest.raises((TypeError, BatchError)) as caught:
        step(given())
    told = " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert re.search(r"is a (list_iterator|generator).*batches=8\)", told)


def test_a_loss_may_take_what_it_needs_from_an_iterator() -> None:
    batches, model = itertools.repeat(BATCHES[0]), nn.Linear(3, 1)
    step = anybatch.TrainStep(
        model, lambda model, given: only_x(model, next(given)), torch.optim.SGD(model.parameters(), 0.1)
    )
    assert step(batches).loss > 0


@pytest.mark.parametrize(("kind", "size"), [(list, None), (list, 2)])
def test_batches_that_are_given_as_one_are_noted_where_the_loss_fails(kind: type, size: int | None) -> None:
    with pytest.raises(TypeError) as caught:
        anybatch.backward(nn.Linear(3, 1), only_x, kind(BATCHES), micro_batch_size=size)
    (note,) = caught.value.__notes__
    assert f"the batch is a {kind.__name__} of 3, the first of 4 rows, like batches of a loader" in note
    assert "for window in anybatch.windows(loader, batches=8): step(window)" in note


def test_samples_of_their_own_are_not_taken_for_batches() -> None:
    samples = [{"x": torch.randn(length), "y": 1} for length in range(2, 6)]
    with pytest.raises(TypeError) as caught:
        anybatch.backward(nn.Linear(3, 1), only_x, samples, micro_batch_size=2)
    assert not any("batches of a loader" in note for note in getattr(caught.value, "__notes__", ()))


def test_a_window_of_them_is_weighed_by_the_count() -> None:
    model, window = model_of(), graphs_in_window()
    expected = joined(model, window)
    reference.clear(model)
    out = anybatch.backward(model, graph_loss, window, count=len)
    reference.assert_float64(reference.gradients_of(model), expected)
    assert (out.micro_batches, out.count) == (3, 9)


def test_a_mean_has_a_count_of_its_own() -> None:
    model, window = model_of(), graphs_in_window()
    expected = joined(model, window)
    reference.clear(model)
    anybatch.backward(model, lambda m, b: anybatch.Mean(graph_loss(m, b) * len(b), len(b)), window)
    reference.assert_float64(reference.gradients_of(model), expected)


def test_without_a_count_each_batch_counts_as_much_and_it_is_said() -> None:
    model, window = model_of(), graphs_in_window()
    sum(graph_loss(model, batch) / 3 for batch in window).backward()
    expected = reference.gradients_of(model)
    reference.clear(model)
    with pytest.warns(AnyBatchWarning, match=r"so their numbers of samples are unknown.*count="):
        anybatch.backward(model, graph_loss, window)
    reference.assert_float64(reference.gradients_of(model), expected)


def test_beside_batches_with_samples_a_count_is_needed() -> None:
    model = model_of()
    fine = {"x": torch.randn(6, 4).double(), "y": torch.randint(3, (6,))}
    odd = fine | {"names": ["only one"]}
    window = next(iter(anybatch.windows([fine, odd], batches=2)))

    def loss_fn(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    with pytest.raises(BatchError, match=r"names.*of this one is unknown: pass count="):
        anybatch.backward(model, loss_fn, window)
    assert model.weight.grad is None
    assert anybatch.backward(model, loss_fn, window, count=lambda batch: len(batch["y"])).count == 12


def test_metrics_may_have_any_number_of_rows() -> None:
    out = anybatch.backward(model_of(), lambda m, b: (graph_loss(m, b), {"label": b.y}), graphs_in_window(), count=len)
    assert len(out.metrics["label"]) == 9


def test_what_a_loss_takes_out_of_it_is_there_again() -> None:
    batch = flat_pixels()

    def loss_fn(model: Any, given: Any) -> Any:
        return pixel_loss(model, {name: given.pop(name) for name in list(given)})

    anybatch.backward(model_of(), loss_fn, batch)
    assert sorted(batch) == ["rows", "sizes", "y"]


def test_when_memory_runs_out_the_text_says_why_it_was_not_cut() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        raise torch.OutOfMemoryError(f"out of memory, says {type(model).__name__}")

    with pytest.raises(DoesNotFit, match="batch, a Graphs, has no tensor"):
        anybatch.backward(model_of(), loss_fn, Graphs(0))


@pytest.mark.parametrize(
    ("batch", "options", "text"),
    [
        ({"x": torch.zeros(4, 1), "y": torch.zeros(3)}, {"broadcast": ("z",)}, "broadcast names"),
        ({"x": torch.zeros(0, 1)}, {}, "no rows"),
        ({"x": torch.zeros(4, 1), "y": torch.zeros(3)}, {"dropout": "per-sample"}, "runs whole"),
    ],
)
def test_what_is_wrong_in_any_case_is_refused(batch: Any, options: Any, text: str) -> None:
    with pytest.raises(BatchError, match=text):
        anybatch.backward(nn.Linear(1, 1), lambda model, batch: model(batch["x"]).mean(), batch, **options)


def test_a_coupled_loss_sees_it_whole_and_of_a_window_the_samples_are_asked_for() -> None:
    def contrast(model: Any, outputs: Any, batch: Any) -> Any:
        return F.cross_entropy(outputs @ outputs.t(), torch.arange(len(outputs))) + 0 * model.weight.sum()

    model, batch = model_of(), CASES["a class of one's own"][0]
    coupled = anybatch.Coupled(lambda m, b: m(b.x), contrast)
    expected, _ = reference.whole_gradients(model, coupled, batch)
    reference.clear(model)
    anybatch.backward(model, coupled, batch)
    reference.assert_float64(reference.gradients_of(model), expected)
    with pytest.raises(BatchError, match="a window for Coupled, which joins samples"):
        anybatch.backward(model, coupled, next(anybatch.windows([batch] * 2, batches=2)))
    with pytest.raises(BatchError, match="a plan for Coupled"):
        anybatch.plan(model, coupled, batch, memory="1GiB")


def two_views(rows: int) -> list[Any]:
    """What the default collate of PyTorch makes of two views and a label."""
    return [[torch.randn(rows, 4).double(), torch.randn(rows, 4).double()], torch.randint(3, (rows,))]


def view_loss(model: Any, batch: Any) -> Any:
    (one, other), label = batch
    return F.cross_entropy(model(one), label) + (model(one) - model(other)).square().sum(1).mean()


@pytest.mark.parametrize("size", [2, 4, None])
def test_a_last_batch_of_as_many_samples_as_views_needs_no_answer(size: int | None) -> None:
    model = model_of()
    step = anybatch.TrainStep(model, view_loss, torch.optim.SGD(model.parameters(), 0.0), micro_batch_size=size)
    for rows in (8, 2):
        batch = two_views(rows)
        expected, _ = reference.whole_gradients(model, view_loss, batch)
        step(batch)
        reference.assert_float64(reference.gradients_of(model), expected)
    window = next(anybatch.windows([two_views(8), two_views(2)], batches=2))
    first, last = (reference.whole_gradients(model, view_loss, batch)[0] for batch in window)
    out = step(window)
    assert out.count == 10
    reference.assert_float64(
        reference.gradients_of(model),
        [0.8 * a + 0.2 * b for a, b in zip(first, last, strict=True) if a is not None and b is not None],
    )


def test_of_a_window_of_them_nothing_is_proved_and_it_is_said_why() -> None:
    out = anybatch.backward(model_of(), graph_loss, graphs_in_window(), count=len)
    assert out.proof is not None
    assert "the batch can't be split: the batch, a Graphs" in str(out.proof)


def test_a_plan_that_does_not_fit_says_why_it_was_not_cut() -> None:
    model = model_of()
    with pytest.raises(DoesNotFit, match=r"can't be split: batch\['rows'\] has 10 rows"):
        anybatch.plan(model, pixel_loss, flat_pixels(), memory=200)
    batch = {"x": torch.ones(50, 4).double(), "ids": torch.ones(7)}
    with pytest.raises(DoesNotFit, match=r"can't be split: batch\['ids'\] has 7 rows"):
        anybatch.plan(model, lambda m, b: m(b["x"]).square().mean(), batch, memory=200)


def test_objects_that_can_be_moved_are_moved() -> None:
    class Movable(Graphs):
        def to(self, device: Any) -> Any:
            twin = Movable(0)
            twin.x = self.x.to(device)
            return twin

    meta = torch.device("meta")
    batch: dict[str, Any] = {"graphs": Movable(0), "number": 3, "other": object()}
    splittable = Splittable([batch])
    assert not splittable.lies_on(meta)
    assert splittable.lies_on(torch.device("cpu"))  # where they were made
    (there,) = moved(splittable.materialise(splittable.plan(None)), meta)
    assert (there["graphs"].x.device, there["other"]) == (meta, batch["other"])
    assert batch["graphs"].x.device.type == "cpu"

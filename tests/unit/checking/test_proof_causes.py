"""Ordinary losses that do not split are stopped with the cause that is theirs, and not with one that fits by chance.

What would be wrong in silence: a count that makes up a few samples only, told as if the loss were averaged over it; a
selection that leaves a part out, told as a mean over something; a state told as weights.
"""

import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
from anybatch.backpropagation import prove

SIZES = ((24, 8), (30, 10), (16, 4))


def net(outputs: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, outputs))


def rows(n: int, **others: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(n, 8), "y": torch.randint(4, (n,)), **others}


def hardest(model: Any, batch: Any) -> Any:
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return losses.topk(len(losses) // 4).values.mean() if len(losses) > 3 else losses.max()


class Running:
    """Divides the loss by its running mean."""

    def __init__(self) -> None:
        self.average = 1.0

    def __call__(self, model: Any, batch: Any) -> Any:
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        self.average = 0.9 * self.average + 0.1 * loss.item()
        return loss / self.average


def advantages(model: Any, batch: Any) -> Any:
    scaled = (batch["gain"] - batch["gain"].mean()) / (batch["gain"].std() + 1e-8)
    chosen = model(batch["x"]).log_softmax(1).gather(1, batch["y"][:, None])[:, 0]
    return -(chosen * scaled).mean()


def soft_dice(model: Any, batch: Any) -> Any:
    found, wanted = model(batch["x"]).sigmoid(), F.one_hot(batch["y"], 4)
    return 1 - 2 * (found * wanted).sum() / (found.sum() + wanted.sum())


def root(model: Any, batch: Any) -> Any:
    return F.mse_loss(model(batch["x"]), F.one_hot(batch["y"], 4).float()).sqrt()


LOSSES: dict[str, tuple[Callable[[], Any], str]] = {
    "hardest examples": (lambda: hardest, "does not add up"),
    "normalised by its running mean": (Running, "`self.average` of Running"),
    "advantages normalised over the batch": (lambda: advantages, "does not add up"),
    "dice over the batch": (lambda: soft_dice, "does not add up"),
    "root of a mean": (lambda: root, "a function of a mean"),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", LOSSES)
def test_it_is_stopped_with_its_own_cause(kind: str, seed: int) -> None:
    torch.manual_seed(seed)
    n, size = SIZES[seed]
    make, cause = LOSSES[kind]
    batch = rows(n, gain=torch.randn(n))
    with pytest.raises(anybatch.NotSplittable, match=cause):
        anybatch.backward(net(), make(), batch, micro_batch_size=size)


def over_lengths(model: Any, batch: Any) -> Any:
    found = model(batch["x"]).log_softmax(-1).transpose(0, 1)
    lengths = torch.full((len(batch["x"]),), 12)
    loss = F.ctc_loss(found, batch["text"], lengths, batch["lengths"], reduction="sum")
    return loss / batch["lengths"].sum()


def test_a_mean_over_lengths_is_told_with_the_count_that_helps() -> None:
    torch.manual_seed(0)
    lengths, text = torch.randint(1, 5, (24,)), torch.randint(1, 5, (24, 4))
    batch, model = {"x": torch.randn(24, 12, 8), "text": text, "lengths": lengths}, net(5)
    with pytest.raises(anybatch.NotSplittable) as caught:
        anybatch.backward(model, over_lengths, batch, micro_batch_size=8)
    assert "count=lambda batch: batch['lengths'].sum()" in str(caught.value)
    out = anybatch.backward(model, over_lengths, batch, micro_batch_size=8, count=lambda batch: batch["lengths"].sum())
    assert out.proof is not None
    assert out.proof.exact


def test_an_average_that_begins_with_the_loss_is_told_as_a_state() -> None:
    class Scaled:
        def __init__(self) -> None:
            self.average: Any = None

        def __call__(self, model: Any, batch: Any) -> Any:
            loss = F.cross_entropy(model(batch["x"]), batch["y"])
            self.average = 0.1 * loss.detach() + 0.9 * (loss.detach() if self.average is None else self.average)
            return loss / self.average

    with pytest.raises(anybatch.NotSplittable, match=r"`self\.average` of Scaled is changed by one micro-batch"):
        anybatch.backward(net(), Scaled(), rows(22), micro_batch_size=6)


def test_who_draws_from_numpy_first_of_all_keeps_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    drawing = sys.modules["numpy.random"]
    monkeypatch.delitem(sys.modules, "numpy.random")  # as before anybody has drawn

    def noisy(model: Any, batch: Any) -> Any:
        sys.modules["numpy.random"] = drawing
        noise = torch.from_numpy(np.random.rand(len(batch["x"]), 8)).float()
        return F.cross_entropy(model(batch["x"] + noise), batch["y"])

    proof = anybatch.backward(net(), noisy, rows(24), micro_batch_size=8).proof
    assert proof is not None
    assert proof.outcome == "undecided"


def test_more_samples_are_compared_where_micro_batches_have_many() -> None:
    def plain(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    found = [anybatch.backward(net(), plain, rows(512), micro_batch_size=size).proof for size in (8, 64, 256)]
    assert [proof and proof.samples for proof in found] == [8, 8, 32]


def test_samples_that_are_cut_to_the_longest_are_not_told_as_a_module_that_couples_them() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.rnn(x)[0][:, -1])  # type: ignore[no-any-return]

    def trimmed(model: Any, batch: Any) -> Any:
        return model(batch["x"][:, : int(batch["length"].max())]).square().mean()

    batch = {"x": torch.randn(16, 9, 3), "length": torch.arange(16) % 8 + 1}
    with pytest.raises(anybatch.NotSplittable, match="cut to the longest"):
        anybatch.backward(Recurrent(), trimmed, batch, micro_batch_size=4)


def test_a_count_that_is_as_many_in_all_is_not_told_by_two_equal_numbers() -> None:
    def weighed(model: Any, batch: Any) -> Any:
        losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return (losses * batch["weight"]).sum() / batch["weight"].sum()

    weight = torch.arange(24) % 3.0
    with pytest.raises(anybatch.NotSplittable, match="not over samples: as many in all, not in each part"):
        anybatch.backward(net(), weighed, rows(24, weight=weight), micro_batch_size=8)
    proof = anybatch.backward(
        net(), weighed, rows(24, weight=weight), micro_batch_size=8, count=lambda batch: batch["weight"].sum()
    ).proof
    assert proof is not None
    assert proof.exact


def test_a_mean_over_positives_is_no_sum_where_few_samples_have_one() -> None:
    """Among four samples with one positive the parts add up without weights, as those of a sum do."""

    def focal(model: Any, batch: Any) -> Any:
        there = (batch["y"] == 1).float()
        losses = F.binary_cross_entropy_with_logits(model(batch["x"])[:, 0], there, reduction="none")
        return losses.sum() / there.sum().clamp(min=1)

    torch.manual_seed(0)
    batch = rows(12)
    batch["y"] = torch.tensor([1, 0, 2, 3] * 3)
    model = net()
    step = anybatch.TrainStep(model, focal, torch.optim.SGD(model.parameters(), 0.1), micro_batch_size=4)
    with pytest.raises(anybatch.NotSplittable) as refused:
        step(batch)
    assert "is a sum over the samples" not in str(refused.value)


def test_a_part_that_divides_by_nothing_is_not_infinitely_off() -> None:
    def over_events(model: Any, batch: Any) -> Any:
        events = (batch["y"] == 0).float()
        return (F.cross_entropy(model(batch["x"]), batch["y"], reduction="none") * events).sum() / events.sum()

    torch.manual_seed(0)
    batch = rows(12)
    batch["y"] = torch.tensor([0, 0, 0, *[1] * 9])
    with pytest.raises(anybatch.NotSplittable, match=r"than whole \(one is not finite\)"):
        anybatch.backward(net(), over_events, batch, micro_batch_size=4)


def test_a_loss_that_is_none_is_no_samples_that_need_others(caplog: pytest.LogCaptureFixture) -> None:
    def each(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

    with pytest.raises(anybatch.LossError, match="reduce it to the mean"):
        anybatch.backward(net(), each, rows(12), micro_batch_size=4)
    assert not caplog.text  # the error says it
    proof = prove(net(), each, rows(12), micro_batch_size=4)
    assert proof is not None
    assert "without the others" not in proof.note
    assert "can't be run (LossError: the loss has shape" in proof.note


def test_a_proof_says_that_numbers_are_drawn_outside_torch() -> None:
    numbers = np.random.default_rng(0)

    def scaled(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch["x"] * float(numbers.uniform(0.5, 1.5))), batch["y"])

    torch.manual_seed(0)
    out = anybatch.backward(net(), scaled, rows(12), micro_batch_size=4)
    assert out.proof is not None
    assert out.proof.exact
    assert "NumPy, Python or a generator of your own draws anew in each micro-batch" in out.proof.note


@pytest.mark.parametrize("kind", ["numpy", "python", "generator"])
def test_samples_that_meet_others_by_numbers_drawn_outside_torch_are_stopped(kind: str) -> None:
    numbers = np.random.default_rng(0)

    def permutation(size: int) -> list[int]:
        if kind == "python":
            return random.sample(range(size), size)
        return list((np.random if kind == "numpy" else numbers).permutation(size))

    def triplets(model: Any, batch: Any) -> Any:
        out = model(batch["x"])
        return F.triplet_margin_loss(out, out.detach() + 0.1, out[permutation(len(out))], margin=2.0)

    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    with pytest.raises(anybatch.NotSplittable, match=r"The loss mixes samples with others .*np\.random\.permutation"):
        anybatch.backward(net(), triplets, rows(24), micro_batch_size=8)


@pytest.mark.parametrize("kind", ["mixup", "items that are drawn"])
def test_what_samples_meet_by_numbers_drawn_outside_torch(kind: str) -> None:
    """Or where they only share what the loss divides by."""

    def loss(model: Any, batch: Any) -> Any:
        x, y, size = batch["x"], batch["y"], len(batch["x"])
        if kind == "items that are drawn":
            taken = torch.from_numpy(np.random.rand(size) < 0.5 + 0.2 * x[:, 0].sign().numpy())
            return F.cross_entropy(model(x)[taken], y[taken])
        order = torch.from_numpy(np.random.permutation(size))
        out, share = model(0.7 * x + 0.3 * x[order]), np.random.beta(1, 1)
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order])

    np.random.seed(0)
    with pytest.raises(anybatch.NotSplittable, match="mixes samples with others of the batch"):
        anybatch.backward(net(), loss, rows(24), micro_batch_size=8)


@pytest.mark.parametrize("kind", ["noise twice", "a number that is drawn", "by what is in them", "collated"])
def test_what_is_drawn_outside_torch_for_each_sample_alone_is_not_stopped(kind: str) -> None:
    """Though it is drawn in another order; how much is drawn may hang on what is in the samples."""

    def loss(model: Any, batch: Any) -> Any:
        x, y, size = batch["x"], batch["y"], len(batch["x"])
        x = x + torch.from_numpy(np.random.randn(*x.shape)).float()
        if kind == "by what is in them":
            x = torch.stack([one + sum(np.random.rand(3 + int(label))) for one, label in zip(x, y, strict=True)])
        each = F.cross_entropy(model(x), y, reduction="none") * torch.from_numpy(np.random.rand(size)).float()
        if kind == "noise twice":
            return each.mean()
        taken = torch.from_numpy(np.random.rand(size) < 0.5) & (y > 0)
        return anybatch.Mean((each * taken).sum(), taken.sum())

    def collate(samples: Any) -> Any:
        x, y = (torch.stack([one[key] for one in samples]) for key in "xy")
        return {"x": x, "y": torch.where(torch.from_numpy(np.random.rand(len(x)) < 0.5), y, -100)}

    np.random.seed(0)
    batch: Any = rows(24)
    options: dict[str, Any] = {}
    loss_fn: Any = loss
    if kind == "collated":
        batch = [{"x": one, "y": label} for one, label in zip(batch["x"], batch["y"], strict=True)]
        loss_fn = lambda model, b: F.cross_entropy(model(b["x"]), b["y"])  # noqa: E731
        options = {"collate": collate, "count": anybatch.count_tokens("y")}
    proof = anybatch.backward(net(), loss_fn, batch, micro_batch_size=8, **options).proof
    assert proof is not None
    assert proof.outcome == ("exact" if kind == "collated" else "undecided")
    assert ("not seen to mix samples" in proof.note) == (kind != "collated")


@pytest.mark.parametrize("kind", ["some of them", "flips", "one of two losses", "noise in turn"])
def test_numbers_drawn_outside_torch_by_which_no_samples_meet_are_split(kind: str) -> None:
    def loss(model: Any, batch: Any) -> Any:
        size, x = len(batch["x"]), batch["x"]
        if kind == "flips":
            x = torch.stack([one if random.random() < 0.5 else -one for one in x])
        elif kind == "noise in turn":
            x = x + torch.as_tensor(np.random.randn(*x.shape), dtype=x.dtype) * random.random()
        each = F.cross_entropy(model(x), batch["y"], reduction="none")
        if kind == "one of two losses" and random.random() < 0.5:
            return model(x).square().mean()
        return each[np.random.choice(size, size // 2, replace=False)].mean() if kind == "some of them" else each.mean()

    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    proof = anybatch.backward(net(), loss, rows(24), micro_batch_size=8).proof
    assert proof is not None
    assert proof.outcome != "not exact"


def cropped(model: Any, batch: Any) -> Any:
    """Windows of a sequence, each drawn once or more often, as a length of its own has it."""
    starts = [random.randrange(n - 3) for n in batch["length"].tolist()]
    windows = [x[start : start + 4] for x, start in zip(batch["ids"], starts, strict=True)]
    return F.cross_entropy(model(F.one_hot(torch.stack(windows), 8).float()[:, 0]), batch["y"])


def masked(model: Any, batch: Any) -> Any:
    """Masks of each sample's own length, in two views."""
    total = torch.zeros(())
    for _ in range(2):
        masks = torch.zeros(batch["ids"].shape)
        for i, n in enumerate(batch["length"].tolist()):
            masks[i, :n] = torch.from_numpy(np.random.rand(n) < 0.3)
        seen = (F.one_hot(batch["ids"], 8) * masks[:, :, None]).sum(1)
        total = total + F.cross_entropy(model(seen), batch["y"])
    return total


def over_drawn(model: Any, batch: Any) -> Any:
    total, count = torch.zeros(()), torch.zeros(())
    for _ in range(2):
        masks = torch.from_numpy(np.random.rand(*batch["ids"].shape) < 0.5)
        counted = (masks & (torch.arange(20) < batch["length"][:, None])).sum(1)
        losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        total, count = total + (losses * counted).sum(), count + counted.sum()
    return anybatch.Mean(total, count)


def of_each_class(model: Any, batch: Any) -> Any:
    """As many numbers for each sample, in the order of the classes."""
    x = batch["x"].clone()
    for y in range(4):
        x[batch["y"] == y] += torch.from_numpy(np.random.randn(int((batch["y"] == y).sum()), 8)).float()
    return F.cross_entropy(model(x), batch["y"])


def encode_noisy(model: Any, batch: Any) -> Any:
    noise = [torch.from_numpy(np.random.randn(*batch["x"].shape)).float() for _ in range(2)]
    return tuple(F.normalize(model(batch["x"] + one), dim=1) for one in noise)


def contrast(model: Any, views: Any) -> Any:
    return F.cross_entropy(views[0] @ views[1].T, torch.arange(len(views[0])))


def named_by_coin(model: Any, batch: Any) -> Any:
    losses = {"first": F.cross_entropy(model(batch["x"]), batch["y"])}
    for n in batch["length"].tolist():
        random.randrange(n)
    if random.random() < 0.5:
        losses["second"] = model(batch["x"]).square().mean() * random.random()
    return losses


@pytest.mark.parametrize(
    "loss", [cropped, masked, over_drawn, of_each_class, anybatch.Coupled(encode_noisy, contrast), named_by_coin]
)
def test_numbers_drawn_outside_torch_that_go_by_the_samples_are_no_reason_to_stop(loss: Any) -> None:
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    batch = rows(16, ids=torch.randint(8, (16, 20)), length=torch.randint(5, 20, (16,)))
    counts: dict[str, Any] = {"count": "forward"} if loss is over_drawn else {}
    proof = anybatch.backward(net(), loss, batch, micro_batch_size=4, **counts).proof
    assert proof is not None
    assert proof.outcome != "not exact"

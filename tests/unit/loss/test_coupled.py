"""Coupled losses against the slow reference: one graph over the whole batch, in float64."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import anybatch
from coupled_losses import (
    CASES,
    Case,
    Embedding,
    Towers,
    clip,
    clip_of_rows,
    embedding,
    parameters_of,
    samples,
    supcon_of_rows,
    towers,
    yielding,
)
from reference import (
    assert_float64,
    assert_value64,
    clear,
    distance,
    gradients_of,
    no_cut,
    norm,
    whole_gradients,
    whole_losses,
)

ROWS = 11


@pytest.mark.parametrize("keep", [0, 1, 2, 99])
@pytest.mark.parametrize("name", list(CASES))
def test_the_gradient_is_the_whole_batchs(name: str, keep: int) -> None:
    case = CASES[name]
    model, batch = case.model(), samples(ROWS)
    parameters = parameters_of(case, model)
    expected, losses = whole_gradients(model, case.whole, batch, parameters)
    blocks = [None, 1, 4, ROWS] if case.of_rows else [None]
    for row_block in blocks:
        for size in (None, 1, 4):
            clear(parameters)
            coupled = case.coupled(keep=keep, row_block=row_block)
            out = anybatch.backward(model, coupled, batch, micro_batch_size=size)
            assert_float64(gradients_of(parameters), expected, f"{name} at {size}, rows {row_block}")
            assert set(out.losses) == set(losses)
            for which, value in out.losses.items():
                assert_value64(value, losses[which])
    clear(parameters)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(list(CASES)),
    rows=st.integers(2, 13),
    size=st.integers(1, 13),
    keep=st.integers(0, 14),
    row_block=st.none() | st.integers(1, 14),
    seed=st.integers(0, 99),
    value=st.booleans(),
)
def test_any_size_and_split(
    name: str, rows: int, size: int, keep: int, row_block: int | None, seed: int, value: bool
) -> None:
    case = CASES[name]
    model, batch = case.model(), samples(rows, seed)
    parameters = parameters_of(case, model)
    clear(parameters)
    expected, losses = whole_gradients(model, case.whole, batch, parameters)
    if not losses or any(g is not None and not g.isfinite().all() for g in expected):
        return  # supcon without a pair
    coupled = case.coupled(keep=keep, row_block=row_block if case.of_rows else None)
    if value:
        step = anybatch.TrainStep(model, coupled, torch.optim.SGD(model.parameters(), 0.0), micro_batch_size=size)
        for which, loss in step.evaluate(batch).losses.items():
            assert_value64(loss, losses[which])
        return
    out = anybatch.backward(model, coupled, batch, micro_batch_size=size)
    assert out.micro_batches == -(-rows // size)
    assert_float64(gradients_of(parameters), expected)
    clear(parameters)


def test_acceptance_two_towers_with_a_learned_scale() -> None:
    """Tower and scale gradients equal the whole batch's; the known bad scheme has 4 times the scale's gradient."""
    model, batch = Towers(), samples(8)
    expected, _ = whole_gradients(model, CASES["clip"].whole, batch)
    for size in (2, 3):
        clear(model)
        anybatch.backward(model, CASES["clip"].coupled(), batch, micro_batch_size=size)
        assert_float64(gradients_of(model), expected)
        assert_float64(gradients_of([model.scale]), expected[:1], "the scale's gradient")
    clear(model)
    parts = [{key: value[i : i + 2] for key, value in batch.items()} for i in range(0, 8, 2)]
    with torch.no_grad():
        cached = [towers(model, part) for part in parts]
    for i, part in enumerate(parts):  # OpenCLIP's --accum-freq
        live = [*cached[:i], towers(model, part), *cached[i + 1 :]]
        clip(model, (torch.cat([a for a, _ in live]), torch.cat([b for _, b in live]))).backward()
    assert model.scale.grad is not None
    assert_float64([model.scale.grad / 4], expected[:1])
    assert_float64(gradients_of(model.image), expected[1:5])


def test_the_loss_of_each_micro_batch_is_another_loss_and_check_says_so() -> None:
    """The fault of those who accumulate a contrastive loss: negatives come from the micro-batch only."""
    model, batch = Towers(), samples(12)
    expected, losses = whole_gradients(model, CASES["clip"].whole, batch)
    with pytest.raises(anybatch.NotSplittable, match="contrastive"):
        anybatch.backward(model, CASES["clip"].whole, batch, micro_batch_size=3)
    out = anybatch.backward(model, CASES["clip"].whole, batch, micro_batch_size=3, verify="off")
    found = gradients_of(model)
    off = distance(found, expected) / norm(expected)
    assert off > 0.2
    assert out.loss < 0.7 * losses["loss"]
    certificate = anybatch.check(model, CASES["clip"].whole, batch, micro_batch_size=3)
    assert not certificate.exact
    assert certificate.error == pytest.approx(off)
    assert "contrastive" in certificate.reasons[0].message
    assert any("anybatch.Coupled(" in remedy for remedy in certificate.reasons[0].remedies)
    assert anybatch.check(model, CASES["clip"].coupled(), batch, micro_batch_size=3).exact


@pytest.mark.parametrize("name", CASES)
def test_check_finds_every_loss_exact(name: str) -> None:
    case = CASES[name]
    model, batch = case.model(), samples(ROWS)
    certificate = anybatch.check(model, case.coupled(row_block=4 if case.of_rows else None), batch, micro_batch_size=4)
    assert certificate.exact, str(certificate)


def test_check_sees_rows_that_are_not_the_wholes() -> None:
    """The columns of a block of rows have not all of their negatives."""

    def wrong(model: Any, outputs: tuple[Tensor, Tensor], rows: slice) -> Tensor:
        image, text = outputs
        logits = image[rows] @ text.T * model.scale.exp()
        own = torch.arange(rows.start, rows.stop)
        square = logits[:, rows].T
        return (F.cross_entropy(logits, own) + F.cross_entropy(square, torch.arange(len(square)))) / 2

    model, batch = Towers(), samples(12)
    whole = anybatch.Coupled(towers, wrong, row_block=12)
    assert float(whole(model, batch).detach()) == pytest.approx(float(clip(model, towers(model, batch)).detach()))
    assert not anybatch.check(model, anybatch.Coupled(towers, wrong, row_block=4), batch, micro_batch_size=3).exact


def test_check_sees_an_encode_that_couples_samples() -> None:
    def centred(model: Any, batch: Any) -> Tensor:
        z: Tensor = model.image(batch["image"])
        return z - z.mean(0)

    coupled = anybatch.Coupled(centred, lambda model, z: (z @ z.T).logsumexp(1).mean())
    certificate = anybatch.check(Towers(), coupled, samples(12), micro_batch_size=3)
    assert not certificate.exact
    assert "encode" in certificate.reasons[0].where


def test_called_by_itself_it_is_the_loss_of_the_whole_batch() -> None:
    model, batch = Towers(), samples(7)
    expected = clip(model, towers(model, batch))
    for row_block in (None, 2):
        loss = CASES["clip"].coupled(row_block=row_block)(model, batch)
        assert_value64(float(loss.detach()), float(expected.detach()))
        assert loss.requires_grad


def test_losses_that_are_yielded_and_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = Towers(), samples(9)
    with monkeypatch.context() as patch:
        patch.setattr(anybatch, "cut", no_cut)
        expected, losses = whole_gradients(model, lambda m, b: yielding(m, towers(m, b)), batch)
    for size, keep in ((None, 1), (2, 0), (4, 99)):
        clear(model)
        out = anybatch.backward(model, anybatch.Coupled(towers, yielding, keep=keep), batch, micro_batch_size=size)
        assert_float64(gradients_of(model), expected)
        assert out.losses == pytest.approx(losses)


def test_a_weighting_of_losses_sees_the_whole_batch() -> None:
    seen: list[torch.Size] = []

    def mean_row(rows: Tensor) -> Tensor:
        seen.append(rows.shape)
        return rows.mean(0)

    def loss(model: Any, outputs: Any) -> Any:
        with anybatch.cut(outputs, weighting=mean_row) as (a, b):
            yield "clip", clip(model, (a, b))
            yield "apart", (a - b).square().mean()

    model, batch = Towers(), samples(9)
    clear(model)
    anybatch.backward(model, anybatch.Coupled(towers, loss), batch, micro_batch_size=2)
    found = gradients_of(model.image)

    def both(model: Any, batch: Any) -> Any:
        a, b = towers(model, batch)
        return {"clip": clip(model, (a, b)) / 2, "apart": (a - b).square().mean() / 2}

    expected, _ = whole_gradients(model, both, batch, model.image.parameters())
    assert_float64(found, expected)
    assert seen == [torch.Size([2, 2 * 9 * 3])]


class Shared(nn.Module):
    """A weight that the encoder and the loss use, and the encoder twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(5, 5, dtype=torch.float64))


def test_a_parameter_of_encode_and_loss() -> None:
    def encode(model: Any, batch: Any) -> Tensor:
        z: Tensor = ((batch["image"] @ model.weight).tanh() @ model.weight).tanh()
        return z

    def loss(model: Any, z: Tensor) -> Tensor:
        logits: Tensor = z @ model.weight @ z.T
        return logits.logsumexp(1).mean()

    case = Case(encode, loss, model=Shared)
    model, batch = Shared(), samples(9)
    expected, _ = whole_gradients(model, case.whole, batch)
    for keep in (0, 1, 99):
        clear(model)
        anybatch.backward(model, case.coupled(keep=keep), batch, micro_batch_size=2)
        assert_float64(gradients_of(model), expected)


@pytest.mark.parametrize("where", ["encode", "loss"])
def test_a_leaf_outside_of_the_model_and_the_gradient_that_was_there(where: str) -> None:
    model, batch = Towers(), samples(9)
    temperature = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
    calls: list[int] = []
    fails_at = 0

    def encode(model: Any, batch: Any) -> Embedding:
        calls.append(1)
        if len(calls) == fails_at:
            raise KeyError
        z = embedding(model, batch)
        return Embedding(z.z * temperature, z.label) if where == "encode" else z

    def outside(model: Any, outputs: Embedding, rows: slice | None = None) -> anybatch.Mean:
        z = outputs.z * temperature if where == "loss" else outputs.z
        return supcon_of_rows(model, Embedding(z, outputs.label), rows or slice(0, len(z)))

    case = Case(encode, outside, outside)
    wanted = [*model.parameters(), temperature]
    expected, _ = whole_gradients(model, case.whole, batch, wanted)
    for size, row_block in ((None, None), (4, None), (4, 2)):
        clear(wanted)
        temperature.grad = torch.tensor(5.0, dtype=torch.float64)
        anybatch.backward(model, case.coupled(row_block=row_block, keep=0), batch, micro_batch_size=size)
        temperature.grad -= 5
        assert_float64(gradients_of(wanted), expected)
    clear(wanted)
    temperature.grad = torch.tensor(5.0, dtype=torch.float64)
    calls.clear()
    fails_at = 6  # the last of the second passes
    with pytest.raises(KeyError):
        anybatch.backward(model, case.coupled(keep=0), batch, micro_batch_size=4)
    assert gradients_of(wanted) == [*[None] * 7, torch.tensor(5.0, dtype=torch.float64)]


def test_only_the_inputs_get_a_gradient() -> None:
    model, batch = Towers(), samples(9)
    expected, _ = whole_gradients(model, CASES["clip"].whole, batch)
    names = [name for name, _ in model.named_parameters()]
    for wanted in ("scale", "image.0.weight"):
        for options in ({"keep": 0}, {"keep": 99}, {"row_block": 2}):
            clear(model)
            parameter = dict(model.named_parameters())[wanted]
            coupled = CASES["clip"].coupled(**options)
            anybatch.backward(model, coupled, batch, micro_batch_size=2, inputs=[parameter])
            found = gradients_of(model)
            index = names.index(wanted)
            assert [i for i, g in enumerate(found) if g is not None] == [index]
            assert_float64([found[index]], [expected[index]])


def test_a_window_of_several_batches() -> None:
    model, batch = Towers(), samples(13)
    expected, losses = whole_gradients(model, CASES["clip"].whole, batch)
    parts = [{key: value[a:b] for key, value in batch.items()} for a, b in ((0, 6), (6, 7), (7, 13))]
    for keep in (0, 1, 3):
        clear(model)
        (window,) = anybatch.windows(parts, batches=3)
        out = anybatch.backward(model, CASES["clip"].coupled(keep=keep), window, micro_batch_size=4)
        assert_float64(gradients_of(model), expected)
        assert out.loss == pytest.approx(losses["loss"])
    case = CASES["dice"]
    picture = case.model()
    expected, _ = whole_gradients(picture, case.whole, batch)
    (window,) = anybatch.windows(parts, batches=3)
    anybatch.backward(picture, case.coupled(), window, micro_batch_size=4)
    assert_float64(gradients_of(picture), expected)


def test_a_count_changes_nothing_but_what_is_counted() -> None:
    model, batch = Towers(), samples(9)
    expected, _ = whole_gradients(model, CASES["several-in-rows"].whole, batch)
    count: Any
    for count in (lambda b: (b["label"] > 0).sum(), {"clip": len_of, "apart": lambda b: b["mask"].sum()}, "forward"):
        for row_block in (None, 4):
            clear(model)
            coupled = CASES["several-in-rows"].coupled(row_block=row_block)
            out = anybatch.backward(model, coupled, batch, micro_batch_size=2, count=count)
            assert_float64(gradients_of(model), expected)
            if isinstance(count, dict):
                assert out.counts == {"clip": 9.0, "apart": float(batch["mask"].sum())}


def len_of(batch: Any) -> int:
    return len(batch["image"])


def test_a_step_with_clipping_is_that_of_the_whole_batch() -> None:
    batch = samples(9)
    models = []
    for size in (None, 2):
        model = Towers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        loss = CASES["clip"].coupled(row_block=4) if size else CASES["clip"].whole
        step = anybatch.TrainStep(model, loss, optimizer, micro_batch_size=size, clip_norm=0.01)
        outs = [step(batch) for _ in range(3)]
        models.append((gradients_of(model), [out.grad_norm for out in outs], [out.loss for out in outs]))
    assert_float64(models[1][0], models[0][0])
    assert models[1][1] == pytest.approx(models[0][1], rel=1e-9)
    assert models[1][2] == pytest.approx(models[0][2], rel=1e-9)


def test_evaluation_gives_the_loss_of_the_whole_batch() -> None:
    model, batch = Towers(dropout=0.5), samples(9)
    step = anybatch.TrainStep(
        model, CASES["clip"].coupled(), torch.optim.SGD(model.parameters(), 1.0), micro_batch_size=2
    )
    before = copy.deepcopy(model.state_dict())
    out = step.evaluate(batch)
    expected = whole_losses(model.eval(), CASES["clip"].whole, batch)["loss"]
    assert_value64(out.loss, float(expected.detach()))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert clip_of_rows(model, towers(model, batch), slice(0, 9)).item() == pytest.approx(out.loss)


def test_rows_without_row_block_are_refused() -> None:
    with pytest.raises(anybatch.LossError, match="takes rows, and row_block is not given"):
        anybatch.Coupled(lambda model, batch: model(batch), lambda model, outputs, rows: outputs[rows].mean())

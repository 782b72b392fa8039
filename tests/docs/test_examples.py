"""The examples: the loop by hand and the one with anybatch train the same where both are right, and differ as said."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import anybatch
from reference import Gradients, assert_float64, assert_value64, distance, gradients_of, norm, whole_gradients

FOLDER = Path(__file__).parents[2] / "examples"
STUDIES = {"batch_and_learning_rate"}  # they compare settings, and are no pairs of loops
NAMES = sorted({path.stem for path in FOLDER.glob("*.py")} - STUDIES)
SMALL = {
    "character_rnn": ("windows", {"rows": 2, "length": 60}),
    "contrastive": ("halves", {"samples": 40}),
    "gan": ("digits", {"samples": 40}),
    "images_with_heads": ("digits", {"samples": 40}),
    "segmentation_dice": ("canvases", {"samples": 22}),
    "seq2seq_attention": ("names", {"samples": 22}),
    "vae": ("digits", {"samples": 40}),
}
Way = Callable[..., list[float]]
Batches = list[dict[str, torch.Tensor]]


@cache
def example(name: str) -> Any:
    """The module of an example, which is in no package."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def subject(name: str, width: int = 8) -> tuple[Any, torch.nn.Module, Batches]:
    """An example, a small model of it and three batches, in float64."""
    module = example(name)
    torch.manual_seed(0)
    function, options = SMALL[name]
    takes_steps = name in ("character_rnn", "gan")
    found = getattr(module, function)(*([3] if takes_steps else []), **options)
    batches = found if takes_steps else [found] * 3
    wide = [{k: v.double() if v.is_floating_point() else v for k, v in batch.items()} for batch in batches]
    return module, module.Model(width).double(), wide


def trained(way: Way, start: torch.nn.Module, batches: Sequence[Any], **options: Any) -> tuple[Gradients, list[float]]:
    """What lies in ``.grad`` after some steps, and the losses on the way."""
    model = copy.deepcopy(start)
    history = way(model, batches, **options)
    return gradients_of(model), history


def first_gradient(way: Way, start: torch.nn.Module, batches: Sequence[Any], **options: Any) -> Gradients:
    return trained(way, start, batches[:1], **options)[0]


def error(found: Gradients, expected: Gradients) -> float:
    return distance(found, expected) / norm(expected)


PAIRS: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
    ("images_with_heads", {}, {}),
    ("images_with_heads", {}, {"micro_batch_size": 9}),
    ("contrastive", {}, {"micro_batch_size": 9}),
    ("seq2seq_attention", {}, {"micro_batch_size": 5, "chunk": 3}),
    ("seq2seq_attention", {"free_running": True}, {"free_running": True, "micro_batch_size": 5, "chunk": 5}),
    ("character_rnn", {}, {"chunk": 7}),
    ("character_rnn", {}, {"chunk": None}),
    ("character_rnn", {"chunk": 7}, {"chunk": 7, "mode": "truncated"}),
    ("vae", {}, {"micro_batch_size": 9}),
    ("segmentation_dice", {}, {"micro_batch_size": 4}),
]


@pytest.mark.parametrize(("name", "hand", "ours"), PAIRS, ids=str)
def test_both_loops_train_the_same(name: str, hand: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    module, start, batches = subject(name)
    for steps in (1, 3):
        expected, losses = trained(module.by_hand, start, batches[:steps], **hand)
        found, history = trained(module.with_anybatch, start, batches[:steps], **ours)
        assert_float64(found, expected)
        assert len(history) == len(losses) == steps
        for one, other in zip(history, losses, strict=True):
            assert_value64(one, other)


def test_contrastive_is_another_loss_when_it_is_accumulated() -> None:
    module, start, batches = subject("contrastive")
    expected = first_gradient(module.by_hand, start, batches)
    assert error(first_gradient(module.by_hand, start, batches, micro_batch_size=4), expected) > 0.1
    assert error(first_gradient(module.by_hand, start, batches, micro_batch_size=20), expected) > 0.01


def test_contrastive_temperature_gets_its_gradient_once() -> None:
    module, start, batches = subject("contrastive")
    models: tuple[Any, Any] = copy.deepcopy(start), copy.deepcopy(start)
    module.by_hand(models[0], batches[:1])
    module.with_anybatch(models[1], batches[:1], micro_batch_size=4)
    expected, found = (model.log_scale.grad.item() for model in models)
    assert abs(expected) > 1e-3
    assert_value64(found, expected, abs(expected))


def test_the_encoder_of_the_decoder_is_reached() -> None:
    module, start, batches = subject("seq2seq_attention")
    model: Any = copy.deepcopy(start)
    module.with_anybatch(model, batches[:1], chunk=3)
    assert float(model.encoder.weight_ih_l0.grad.norm()) > 0
    fed, _ = trained(module.with_anybatch, start, batches[:1], free_running=True)
    assert error(fed, gradients_of(model)) > 0.01


def test_truncated_is_another_gradient() -> None:
    module, start, batches = subject("character_rnn")
    expected = first_gradient(module.by_hand, start, batches)
    assert error(first_gradient(module.by_hand, start, batches, chunk=7), expected) > 1e-3


def test_windows_of_the_stream_follow_each_other() -> None:
    module, start, batches = subject("character_rnn")
    for before, after in pairwise(batches):
        assert torch.equal(before["y"][:, -1], after["x"][:, 0])
    _, carried = trained(module.with_anybatch, start, batches, chunk=7)
    fresh = []
    model = copy.deepcopy(start)
    for batch in batches:  # each with a state and an optimizer of its own
        fresh += module.with_anybatch(model, [batch], chunk=7)
    assert carried[0] == fresh[0]
    assert abs(carried[1] - fresh[1]) > 1e-6


def test_players_train_the_same_and_the_discriminator_stays_clean() -> None:
    module, start, batches = subject("gan")
    for steps in (1, 3):
        hand, ours = copy.deepcopy(start), copy.deepcopy(start)
        losses = module.by_hand(hand, batches[:steps])
        history = module.with_anybatch(ours, batches[:steps], micro_batch_size=9)
        assert_float64(gradients_of(ours.generator), gradients_of(hand.generator))
        assert_float64(list(ours.parameters()), list(hand.parameters()), "the weights")
        for one, other in zip(history, losses, strict=True):
            assert_value64(one, other)


def test_what_is_left_in_the_discriminator() -> None:
    module, start, batches = subject("gan")
    wanted: Any = start.discriminator
    clean, _ = whole_gradients(start, module.tells_apart, batches[0], wanted.parameters())
    for way, is_clean in ((module.by_hand, False), (partial(module.with_anybatch, micro_batch_size=9), True)):
        model: Any = copy.deepcopy(start)
        way(model, batches[:1])
        found = gradients_of(model.discriminator)
        if is_clean:
            assert_float64(found, clean)
        else:
            assert error(found, clean) > 0.1


def test_vae_by_hand_trains_with_another_weight_in_micro_batches() -> None:
    module, start, batches = subject("vae")

    def with_a_quarter(model: Any, batch: Any) -> dict[str, torch.Tensor]:
        reconstruction, divergence = module.two_means(model, batch).values()
        return {"reconstruction": reconstruction, "divergence": divergence / 4}

    found = first_gradient(module.by_hand, start, batches, micro_batch_size=10)  # four of them
    assert error(found, first_gradient(module.by_hand, start, batches)) > 0.01
    assert_float64(found, whole_gradients(start, with_a_quarter, batches[0])[0])


def test_check_finds_the_sum_of_the_vae() -> None:
    module, start, batches = subject("vae")

    def mean_and_sum(model: Any, batch: Any) -> torch.Tensor:
        reconstruction, divergence = module.both_losses(model, batch)
        loss: torch.Tensor = reconstruction.mean() + divergence.sum() / 64 / 40
        return loss

    def two_means(model: Any, batch: Any) -> torch.Tensor:
        return torch.stack([*module.two_means(model, batch).values()]).sum()

    assert not anybatch.check(start, mean_and_sum, batches[0]).exact
    assert anybatch.check(start, two_means, batches[0]).exact


def test_dice_over_the_batch_is_no_mean() -> None:
    module, start, batches = subject("segmentation_dice")
    expected = first_gradient(module.by_hand, start, batches)
    assert error(first_gradient(module.by_hand, start, batches, micro_batch_size=4), expected) > 0.01
    each, _ = whole_gradients(start, module.dice_of_each, batches[0])
    found = first_gradient(module.with_anybatch, start, batches, loss_fn=module.dice_of_each, micro_batch_size=4)
    assert_float64(found, each)
    assert error(each, expected) > 0.1


MEMORY: list[tuple[str, Mapping[str, Any], float]] = [
    ("images_with_heads", {}, 0.7),
    ("images_with_heads", {"micro_batch_size": 10}, 0.3),
    ("contrastive", {"micro_batch_size": 5}, 0.7),
    ("gan", {"micro_batch_size": 10}, 0.5),
    ("seq2seq_attention", {"micro_batch_size": 11, "chunk": 4}, 0.5),
    ("character_rnn", {"chunk": 10}, 0.5),
    ("vae", {"micro_batch_size": 10}, 0.5),
    ("segmentation_dice", {"micro_batch_size": 4}, 0.5),
]


@pytest.mark.parametrize(("name", "options", "share"), MEMORY, ids=str)
def test_less_is_in_memory(name: str, options: Mapping[str, Any], share: float) -> None:
    module, start, batches = subject(name)

    def peak(way: Way) -> int:
        model = copy.deepcopy(start)
        memory = anybatch.measure(partial(way, model, batches[:1]), model=model, batch=batches[0])
        return memory.peak_bytes - sum(memory.at_peak.get(kind, 0) for kind in ("parameters", "inputs"))

    assert peak(partial(module.with_anybatch, **options)) <= share * peak(module.by_hand)


@pytest.fixture
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = example(request.param)
    function, options = SMALL[request.param]
    monkeypatch.setattr(module, function, partial(getattr(module, function), **options))
    monkeypatch.setattr(module, "Model", partial(module.Model, 8))
    return module


@pytest.mark.parametrize("small", NAMES, indirect=True)
def test_prints_what_it_found(small: Any, capsys: pytest.CaptureFixture[str]) -> None:
    state = torch.get_rng_state()
    small.main(steps=2)
    torch.set_rng_state(state)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(("by hand", "teacher forcing, by hand")) for line in lines)
    assert all(" MiB" in line for line in lines if not line.startswith(" "))
    assert "nan" not in "".join(lines)


def test_batch_and_learning_rate_prints_its_tables_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = example("batch_and_learning_rate")
    small = partial(replace, sizes=(16, 64), rates=(0.1, 0.2), epochs=1)
    problems = {"digits": small(module.digits()), "text": small(module.text(2048, 4))}
    monkeypatch.setattr(module, "digits", lambda: problems["digits"])
    monkeypatch.setattr(module, "text", lambda: problems["text"])
    draws = importlib.util.find_spec("matplotlib") is not None  # of the extra `bench`
    with torch.random.fork_rng():
        module.main(seeds=2, figure=str(tmp_path / "out.svg") if draws else None)
    printed = capsys.readouterr().out
    assert printed.count("| 64 | 24 |") == 1  # 1536 digits
    assert printed.count("| 64 | 32 |") == 1
    assert not draws or (tmp_path / "out.svg").read_text().count("batch 64") == 2


def test_rates_are_what_the_rules_give() -> None:
    module = example("batch_and_learning_rate")
    problem = module.digits()
    wanted = {"kept": 0.2, "x sqrt(k)": 0.8, "x k": 3.2}
    for name, rule in module.RULES.items():
        assert module.ruled(problem, 0.2, 128, rule) == pytest.approx(wanted[name])
    losses = {0.1: [0.3, 0.31], 0.2: [0.2, 0.22], 0.4: [0.19, 0.21], 0.8: [float("nan"), 0.1]}
    assert (module.best(losses), module.found_for(losses)) == (0.4, 0.2)


def test_all_are_short_and_in_the_table() -> None:
    assert sorted(SMALL) == NAMES
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"[{name}.py]({name}.py)" in table for name in STUDIES)
    for name in NAMES:
        lines = (FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 145, f"{name} has {len(lines)} lines"
        assert f"[{name}.py]({name}.py)" in table
        assert example(name).by_hand.__doc__
        assert example(name).with_anybatch.__doc__

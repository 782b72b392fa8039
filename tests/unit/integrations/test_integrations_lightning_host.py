"""ExactGradient behaves as Lightning's own automatic optimization: hooks, passes without a backward, what is logged."""

from typing import Any

import pytest
import torch

import anybatch

pytest.importorskip("lightning.pytorch")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging

from anybatch.integrations.lightning import ExactGradient

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
]
HOOKS = (
    "on_before_zero_grad", "optimizer_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
)  # fmt: skip


class Regression(pl.LightningModule):
    """Notes what Lightning calls, and in which order."""

    def __init__(self, *, logs: Any = (), fails_at: int = -1, without_loss: int = -1) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        self.calls: list[str] = []
        self.norms: list[float | None] = []
        self.logs, self.fails_at, self.without_loss = logs, fails_at, without_loss

    def training_step(self, batch: Any, index: int) -> torch.Tensor | None:
        self.calls.append("training_step")
        if index == self.fails_at:
            raise OSError("no more data")
        if index == self.without_loss:
            return None
        for value in self.logs:
            self.log("value", value)
        x, y = batch
        return torch.nn.functional.mse_loss(self.layers(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layers.parameters(), lr=0.05, momentum=0.9)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        gradient = next(self.parameters()).grad
        self.norms.append(None if gradient is None else float(gradient.norm()))


def _noting(name: str) -> Any:
    plain = getattr(Regression, name)

    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(name)
        return plain(self, *args, **kwargs)

    return hook


for _name in HOOKS:
    setattr(Regression, _name, _noting(_name))


def fit(module: Regression, *callbacks: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    x = torch.randn(32, 4)
    rows = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=list(callbacks), **options,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=8))
    return trainer


def both(*exact: Any, make: Any = Regression, **options: Any) -> list[tuple[Any, Any]]:
    """The same run as Lightning does it, and with the exact gradient."""
    found = []
    for callbacks in ((), exact):
        torch.manual_seed(1)
        module = make()
        found.append((module, fit(module, *callbacks, **options)))
    return found


def test_weights_that_are_averaged_are_those_of_lightning() -> None:
    averaging: dict[str, Any] = {"swa_lrs": 0.01, "swa_epoch_start": 2}
    found = []
    for exact in ([], [ExactGradient()]):
        torch.manual_seed(1)
        module = Regression()
        trainer = fit(module, StochasticWeightAveraging(**averaging), *exact, max_epochs=4)
        found.append((module, trainer))
    (own, plain), (ours, trainer) = found
    assert trainer.global_step == plain.global_step
    assert ours.calls == own.calls
    for name, value in own.state_dict().items():
        assert torch.equal(value, ours.state_dict()[name]), name


@pytest.mark.parametrize("accumulate", [1, 2])
def test_hooks_come_in_the_order_of_lightning_and_see_the_same_gradients(accumulate: int) -> None:
    (own, plain), (ours, trainer) = both(
        ExactGradient(batch_norm="ghost"), max_epochs=2, accumulate_grad_batches=accumulate
    )
    assert ours.calls == own.calls
    assert ours.norms == pytest.approx(own.norms)
    progress = [one.fit_loop.epoch_loop.automatic_optimization.optim_progress.state_dict() for one in (plain, trainer)]
    assert progress[0] == progress[1]


def test_hooks_come_once_a_batch_in_micro_batches_too() -> None:
    module = Regression()
    fit(module, ExactGradient(micro_batch_size=4, batch_norm="ghost"), max_steps=2)
    once = ["training_step", *HOOKS[:3], "training_step", *HOOKS[3:]]
    assert module.calls == once * 2


def test_what_was_trained_before_an_error_is_counted_as_lightning_counts_it() -> None:
    counted = []
    for exact in ([], [ExactGradient()]):
        module = Regression(fails_at=2)
        trainer = pl.Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[*exact], max_epochs=1,
        )  # fmt: skip
        x = torch.randn(32, 4)
        rows = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
        with pytest.raises(OSError, match="no more data"):
            trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=8))
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        counted.append((loop.optim_progress.state_dict(), [p.grad is None for p in module.parameters()]))
    assert counted[0] == counted[1]


@pytest.mark.parametrize("value", [None, "text", [1.0], {"a": 1.0}, torch.ones(2)], ids=str)
def test_what_can_not_be_logged_is_refused_in_the_words_of_lightning(value: Any) -> None:
    texts = []
    for exact in ([], [ExactGradient(micro_batch_size=4, batch_norm="ghost")]):
        with pytest.raises(ValueError, match=r"self\.log") as refused:
            fit(Regression(logs=[value]), *exact, max_steps=1)
        texts.append(str(refused.value))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_batches_that_are_only_numbers_are_trained_as_lightning_does(accumulate: int) -> None:
    x = torch.randn(4, 8, 4)

    class Indexed(Regression):
        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            found: torch.Tensor = self.layers(x[batch]).square().mean()
            return found

    found = []
    for exact in ([], [ExactGradient()]):
        torch.manual_seed(1)
        module = Indexed()
        pl.Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[*exact], max_epochs=1, accumulate_grad_batches=accumulate,
        ).fit(module, [0, 1, 2, 3])  # fmt: skip
        found.append(module.state_dict())
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name])


def test_a_batch_without_a_loss_is_skipped_as_lightning_skips_it() -> None:
    (own, plain), (ours, trainer) = both(ExactGradient(), make=lambda: Regression(without_loss=1), max_epochs=1)
    assert ours.calls == own.calls
    assert trainer.global_step == plain.global_step
    for name, value in own.state_dict().items():
        assert torch.equal(value, ours.state_dict()[name]), name


class Joined(pl.LightningModule):
    """A loss of the user's over windows of several batches of the loader."""

    def __init__(self, loss: Any, *layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers, self.loss, self.calls = torch.nn.Sequential(torch.nn.Linear(4, 3), *layers), loss, 0

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.calls += 1
        found: torch.Tensor = self.loss(self, self.layers(batch[0]))
        return found

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def _fitted(module: pl.LightningModule, accumulate: int, **options: Any) -> ExactGradient:
    exact = ExactGradient(**options)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 4)), batch_size=8)
    pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[exact], max_epochs=1, accumulate_grad_batches=accumulate,
    ).fit(module, loader)  # fmt: skip
    return exact


@pytest.mark.parametrize(
    "loss", [lambda _, out: out.std(0).mean(), lambda own, out: out.square().mean() * min(1.0, own.calls / 10)]
)
def test_the_batches_of_a_window_are_proved_as_the_parts_of_a_batch_are(loss: Any) -> None:
    with pytest.raises(anybatch.NotSplittable) as refused:
        _fitted(Joined(loss), 2)
    assert "anybatch.TrainStep(model, loss_fn, optimizer)" not in str(refused.value)
    _fitted(Joined(loss), 1)
    _fitted(Joined(loss), 2, verify="off")
    _fitted(Joined(lambda _, out: out.square().mean()), 2)


def test_batch_norm_over_a_window_is_refused_as_over_micro_batches() -> None:
    made = [Joined(lambda _, out: out.square().mean(), torch.nn.BatchNorm1d(3)) for _ in range(3)]
    with pytest.raises(anybatch.NotSplittable, match="window has 2 batches"):
        _fitted(made[0], 2)
    _fitted(made[1], 1)
    _fitted(made[2], 2, batch_norm="ghost")

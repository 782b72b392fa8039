"""Lightning divides by accumulate_grad_batches; ExactGradient gives the gradient of the whole batch."""

import copy
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console

import anybatch
import forked_python
from anybatch.integrations.lightning import DoctorCallback, ExactGradient
from lightning_runs import COUNT, Tagger, data, fitted, truth
from reference import assert_bitwise, assert_float64, distance, gradients_of, norm

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a window": ({}, {"accumulate_grad_batches": 3}),
    "a window in threes": ({"micro_batch_size": 3}, {"accumulate_grad_batches": 3}),
    "a batch in threes": ({"micro_batch_size": 3}, {"batch_size": 22}),
    "a batch under a budget": ({"memory": "16MiB"}, {"batch_size": 22}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("constant_times")
def test_the_gradient_is_that_of_the_whole_batch(case: str) -> None:
    exact, options = CASES[case]
    module, rows = Tagger(), data()
    expected, loss = truth(module, rows)
    trainer = fitted(module, rows, ExactGradient(count=COUNT, **exact), **options)
    assert len(module.gradients) == 1
    assert_float64(module.gradients[0], expected)
    assert float(trainer.callback_metrics["loss_epoch"]) == pytest.approx(loss, rel=1e-6)
    assert float(trainer.callback_metrics["twice"]) == pytest.approx(2 * loss, rel=1e-6)
    assert max(module.sizes) == exact.get("micro_batch_size", options.get("batch_size", 8))


def test_lightnings_own_gradient_is_another() -> None:
    module, rows = Tagger(), data()
    expected, loss = truth(module, rows)
    trainer = fitted(module, rows, accumulate_grad_batches=3)
    assert distance(module.gradients[0], expected) > 0.3 * norm(expected)
    assert abs(float(trainer.callback_metrics["loss_epoch"]) - loss) > 1e-3


def test_the_short_window_at_the_end_of_an_epoch() -> None:
    module, rows = Tagger(), data(22)
    before = copy.deepcopy(module)
    fitted(module, rows, ExactGradient(count=COUNT), accumulate_grad_batches=2, gradient_clip_val=0.0)
    assert len(module.gradients) == 2
    assert_float64(module.gradients[0], truth(before, rows[:16])[0])
    moved = copy.deepcopy(before).double()
    for parameter, gradient in zip(moved.parameters(), module.gradients[0], strict=True):
        parameter.data -= 0.1 * gradient  # type: ignore[operator]
    assert_float64(module.gradients[1], truth(moved, rows[16:])[0])


def test_one_step_for_each_logical_batch(tmp_path: Path) -> None:
    module, rows = Tagger(), data(44)
    logger = CSVLogger(tmp_path)
    trainer = fitted(
        module, rows, ExactGradient(count=COUNT, micro_batch_size=3), LearningRateMonitor("step"),
        accumulate_grad_batches=3, logger=logger, max_epochs=2,
    )  # fmt: skip
    assert trainer.global_step == 4
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 4
    assert len(module.outputs) == 12  # a batch of the loader each, as in Lightning
    assert torch.equal(module.outputs[0]["first"], torch.stack([row["ids"][0] for row in rows[:8]]))
    assert module.outputs[0]["text"] == "kept"
    assert float(module.outputs[0]["scalar"]) == pytest.approx(float(module.outputs[0]["loss"]))
    text = Path(logger.log_dir, "metrics.csv").read_text()
    assert "lr-SGD" in text
    assert "loss_step" in text


def test_a_step_may_take_its_batch_apart() -> None:
    class Popping(Tagger):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            found = super().training_step(dict(batch), batch_idx)["loss"]
            batch.pop("labels")
            self.log("after", found.detach(), on_step=False, on_epoch=True)
            return found

    module, rows = Popping(), data()
    expected, loss = truth(module, rows)
    trainer = fitted(module, rows, ExactGradient(count=COUNT, micro_batch_size=3), accumulate_grad_batches=3)
    assert_float64(module.gradients[0], expected)
    assert float(trainer.callback_metrics["after"]) == pytest.approx(loss, rel=1e-6)


def test_clipping_is_of_the_whole_gradient() -> None:
    module, rows = Tagger(), data()
    expected, _ = truth(module, rows)
    before = [parameter.detach().double() for parameter in module.parameters()]
    fitted(
        module, rows, ExactGradient(count=COUNT, micro_batch_size=3), accumulate_grad_batches=3, gradient_clip_val=0.01
    )
    for old, new, gradient in zip(before, module.parameters(), expected, strict=True):
        assert gradient is not None
        torch.testing.assert_close(new, old - 0.1 * gradient * (0.01 / (norm(expected) + 1e-6)), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("exact", [{"micro_batch_size": 3}, {"memory": "16MiB"}], ids=["in threes", "under a budget"])
def test_a_resumed_run_is_bitwise_the_same(exact: dict[str, Any], tmp_path: Path) -> None:
    rows = data(48)

    def run(checkpoint: str | None = None) -> Tagger:
        torch.manual_seed(5)
        module = Tagger().double()  # Lightning keeps neither random states nor what float64 has beyond float32
        saving = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
        fitted(
            module, rows, ExactGradient(count=COUNT, **exact), saving, max_epochs=3, enable_checkpointing=True,
            batch_size=16, checkpoint=checkpoint,
        )  # fmt: skip
        return module

    whole = run()
    resumed = run(str(tmp_path / "epoch=1.ckpt"))
    assert len(resumed.gradients) == 3
    assert_bitwise(list(resumed.parameters()), list(whole.parameters()))
    saved = torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)["callbacks"]
    assert (next(v for k, v in saved.items() if "ExactGradient" in k)["gradient"]["plan"] is None) == (
        "memory" not in exact
    )


def test_bfloat16_is_as_near_as_the_whole_batch() -> None:
    first, rows = Tagger().float(), data()
    expected, _ = truth(first, rows)
    whole, split = copy.deepcopy(first), copy.deepcopy(first)
    fitted(whole, rows, precision="bf16-mixed", batch_size=22)
    fitted(split, rows, ExactGradient(count=COUNT), precision="bf16-mixed", accumulate_grad_batches=3)
    errors = [distance(module.gradients[0], expected) for module in (whole, split)]
    assert 0 < errors[1] <= 2 * errors[0]


def test_batches_without_any_label_add_nothing() -> None:
    module, rows = Tagger(), data()
    for row in rows[:8]:
        row["labels"] = torch.full_like(row["labels"], -100)
    expected, loss = truth(module, rows)
    trainer = fitted(module, rows, ExactGradient(count=COUNT, micro_batch_size=3), accumulate_grad_batches=3)
    assert_float64(module.gradients[0], expected)
    assert float(trainer.callback_metrics["loss_epoch"]) == pytest.approx(loss, rel=1e-6)


def test_memory_that_runs_out_makes_smaller_micro_batches() -> None:
    class Small(Tagger):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            found = super().training_step(batch, batch_idx)
            if len(batch["ids"]) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return found

    module, rows = Small(), data()
    expected, loss = truth(module, rows)
    trainer = fitted(module, rows, ExactGradient(count=COUNT), accumulate_grad_batches=3)
    assert_float64(module.gradients[0], expected)
    assert [n for n in module.sizes if n > 4] == [8]
    assert float(trainer.callback_metrics["loss_epoch"]) == pytest.approx(loss, rel=1e-6)


def test_an_error_leaves_the_gradient_of_the_window() -> None:
    class Failing(Tagger):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                raise RuntimeError("on purpose")
            return super().training_step(batch, batch_idx)

    module, rows = Failing(), data()
    expected, _ = truth(module, rows[:8])
    exact = ExactGradient(count=COUNT)
    with pytest.raises(RuntimeError, match="on purpose"):
        fitted(module, rows, exact, accumulate_grad_batches=3)
    assert_float64(gradients_of(module), expected)
    assert "log" not in module.__dict__


class Manual(Tagger):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(Tagger):
    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


@pytest.mark.parametrize(
    ("module", "exact", "options", "text"),
    [
        (Manual, {}, {}, "automatic_optimization=False"),
        (OwnBackward, {}, {}, "backward"),
        (Tagger, {"memory": "16MiB"}, {"accumulate_grad_batches": 3}, "accumulate_grad_batches"),
    ],
)
def test_what_takes_the_gradient_away_is_refused(module: Any, exact: Any, options: Any, text: str) -> None:
    with pytest.raises(anybatch.BatchError, match=text):
        fitted(module(), data(), ExactGradient(**exact), **options)


def test_lightnings_own_loop_is_put_back() -> None:
    trainer = fitted(Tagger(), data(), ExactGradient(count=COUNT))
    assert trainer.global_step == 3
    assert type(trainer.fit_loop.epoch_loop.automatic_optimization).__name__ == "_AutomaticOptimization"


def test_the_doctor_reports_at_the_end() -> None:
    class Forgetful(Tagger):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.out.parameters(), lr=0.1)

    said = io.StringIO()
    watching = DoctorCallback(console=Console(file=said, width=100))
    fitted(Forgetful(), data(80), ExactGradient(count=COUNT), watching, max_epochs=2)
    assert watching.doctor is not None
    assert watching.doctor.findings[0].name == "OPT_PARAM_MISSING"
    assert "embed" in said.getvalue()
    assert not torch.nn.modules.module._global_forward_hooks


def test_the_doctor_comes_off_when_the_run_breaks() -> None:
    class Failing(Tagger):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step({**batch, "ids": batch["ids"] + 100}, batch_idx)

    watching = DoctorCallback(console=Console(file=io.StringIO()))
    with pytest.raises(IndexError):
        fitted(Failing(), data(), watching)
    assert not torch.nn.modules.module._global_forward_hooks


def test_without_lightning_it_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['lightning'] = None; import anybatch.integrations.lightning"
    done = forked_python.run([sys.executable, "-c", code], tmp_path)
    assert "pip install 'lightning>=2.4'" in done.stderr

"""Everything around the gradient stays the Trainer's: one step for each logical batch."""

import copy
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import Trainer, TrainerCallback

import forked_python
from anybatch.integrations.transformers import DoctorCallback, ExactTrainer
from reference import assert_bitwise, whole_gradients
from trainer_heads import Tagger, bert, collated, llama, needs_transformers, tokens, trained

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def weights(model: torch.nn.Module) -> list[torch.Tensor | None]:
    """Copies of all parameters."""
    return [parameter.detach().clone() for parameter in model.parameters()]


@needs_transformers(5, 0, "the first label of each row is counted, too")
def test_callbacks_logs_and_schedules_see_what_the_trainer_shows(tmp_path: Path) -> None:
    """48 rows in batches of 8, three to an update, so that the Trainer's own gradient is right too."""
    model, samples = llama(), tokens(44)
    arguments = {
        "lr_scheduler_type": "linear", "num_train_epochs": 2, "include_num_input_tokens_seen": "all",
        "max_grad_norm": 0.5, "optim": "adamw_torch", "learning_rate": 1e-2,
    }  # fmt: skip
    runs = [
        trained(kind, copy.deepcopy(model), samples, tmp_path / kind.__name__, args=arguments)
        for kind in (Trainer, ExactTrainer)
    ]
    (own, own_seen), (exact, seen) = runs
    assert seen.calls == own_seen.calls == {"step_begin": 4, "substep_end": 8, "step_end": 4}
    assert exact.state.global_step == own.state.global_step == 4
    assert exact.state.epoch == own.state.epoch
    assert exact.state.num_input_tokens_seen == own.state.num_input_tokens_seen == 2 * 44 * 9
    assert exact.state.total_flos == own.state.total_flos
    assert exact.lr_scheduler.last_epoch == own.lr_scheduler.last_epoch == 4
    for mine, other in zip(exact.state.log_history[:4], own.state.log_history[:4], strict=True):
        assert mine.keys() == other.keys()
        assert mine["learning_rate"] == other["learning_rate"]
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_clipping_is_of_the_whole_gradient(tmp_path: Path) -> None:
    model, samples = Tagger(), tokens()
    reference = copy.deepcopy(model).double()
    gradients, _ = whole_gradients(reference, lambda model, batch: model(**batch)["loss"], collated(samples))
    for parameter, gradient in zip(reference.parameters(), gradients, strict=True):
        parameter.grad = gradient
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    trainer, _ = trained(ExactTrainer, model, samples, tmp_path, args={"max_grad_norm": 0.01}, micro_batch_size=3)
    for found, expected in zip(trainer.model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@needs_transformers(4, 57, "an epoch has fewer updates, or what numpy saved is refused")
@pytest.mark.parametrize("way", [{"micro_batch_size": 3}, {"memory": "64MiB"}], ids=["in threes", "under a budget"])
def test_a_resumed_run_is_bitwise_the_same(way: dict[str, Any], tmp_path: Path) -> None:
    samples = tokens(60)  # of which an epoch has three updates; the second is saved
    arguments = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2, "optim": "adamw_torch"}
    dropping = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3}

    def run(**options: Any) -> Any:
        torch.manual_seed(3)
        model = bert("MaskedLM", **dropping)
        return trained(ExactTrainer, model, samples, tmp_path, args=arguments, **way, **options)[0]

    whole = weights(run().model)
    saved = tmp_path / "checkpoint-2"
    state = json.loads((saved / "anybatch.json").read_text())
    assert (state["plan"] is None) == ("memory" not in way)
    resumed = run(resume=str(saved))
    assert resumed.state.global_step == 6
    assert_bitwise(weights(resumed.model), whole)


@needs_transformers(4, 48, "what numpy saved is refused")
def test_sizes_that_were_learnt_are_resumed(tmp_path: Path) -> None:
    class Small(Tagger):
        tried: list[int]

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            self.tried.append(len(input_ids))
            if len(input_ids) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(input_ids, labels)

    arguments = {"save_strategy": "steps", "save_steps": 1, "num_train_epochs": 2}
    Small.tried = []
    trained(ExactTrainer, Small(), tokens(), tmp_path, args=arguments)
    assert max(Small.tried) == 8
    Small.tried = []
    trained(ExactTrainer, Small(), tokens(), tmp_path, args=arguments, resume=str(tmp_path / "checkpoint-1"))
    assert max(Small.tried) == 4


def test_training_twice_goes_on_with_the_same_trainer(tmp_path: Path) -> None:
    trainer, seen = trained(ExactTrainer, Tagger(), tokens(), tmp_path, micro_batch_size=3)
    trainer.train()
    assert len(seen.gradients) == 2


def test_evaluation_is_the_trainers(tmp_path: Path) -> None:
    trainer, _ = trained(ExactTrainer, Tagger(), tokens(), tmp_path, eval_dataset=tokens(5))
    with torch.no_grad():
        expected = trainer.model(**collated(tokens(5)))["loss"].item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)


class Stopping(TrainerCallback):
    """Ends the first epoch in the middle of a window."""

    is_over = False

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_epoch_stop = not self.is_over
        self.is_over = True
        return control


@needs_transformers(4, 47, "updates and windows are not the same batches")
def test_a_window_that_was_left_is_forgotten(tmp_path: Path) -> None:
    model, samples = Tagger(), tokens()
    _, seen = trained(
        ExactTrainer, copy.deepcopy(model), samples, tmp_path, callbacks=[Stopping()], args={"num_train_epochs": 2}
    )
    _, once = trained(ExactTrainer, copy.deepcopy(model), samples, tmp_path)
    assert_bitwise(seen.gradients[0], once.gradients[0])


def test_the_doctor_finds_a_head_that_is_in_no_optimizer(tmp_path: Path) -> None:
    model = llama()
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if "lm_head" not in name], lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    said = io.StringIO()
    watching = DoctorCallback(output=tmp_path / "report.html", console=Console(file=said, width=100))
    trained(
        ExactTrainer, model, tokens(120), tmp_path, callbacks=[watching], optimizers=(optimizer, schedule),
        args={"num_train_epochs": 3},
    )  # fmt: skip
    assert watching.doctor is not None
    assert watching.doctor.findings[0].name == "OPT_PARAM_MISSING"
    assert "lm_head" in said.getvalue()
    assert "OPT_PARAM_MISSING" in (tmp_path / "report.html").read_text()
    assert not torch.nn.modules.module._global_forward_hooks


def test_the_doctor_changes_nothing(tmp_path: Path) -> None:
    model, samples = Tagger(), tokens(44)
    callbacks: list[list[Any]] = [[], [DoctorCallback(console=Console(file=io.StringIO()))]]
    found = [
        weights(trained(ExactTrainer, copy.deepcopy(model), samples, tmp_path, callbacks=one)[0].model)
        for one in callbacks
    ]
    assert_bitwise(*found)


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from anybatch.integrations.transformers import ExactTrainer
from trainer_heads import Tagger, tokens, trained
trained(ExactTrainer, Tagger(), tokens(), Path({folder!r}), micro_batch_size=3)
"""


def test_the_command_line_checks_a_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parents[2]), folder=str(tmp_path)), encoding="utf-8")
    done = forked_python.run([sys.executable, "-m", "anybatch", "check", str(script)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "exact" in done.stdout


def test_without_transformers_it_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['transformers'] = None; import anybatch.integrations.transformers"
    done = forked_python.run([sys.executable, "-c", code], tmp_path)
    assert "pip install 'transformers[torch]" in done.stderr

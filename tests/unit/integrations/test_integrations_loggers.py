"""Numbers of each update reach any function, a file, TensorBoard and Weights & Biases; once an update."""

import csv
import io
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import anybatch
from anybatch.integrations.loggers import Csv, Log, Observers, TensorBoard, WandB
from anybatch.integrations.progress import ProgressBar


def loss_fn(model: Any, batch: Any) -> Any:
    output = model(batch)
    return {"mean": output.mean(), "square": output.square().mean()}


def stepped(recorder: Any, updates: int = 4, **options: Any) -> anybatch.TrainStep:
    """Takes some steps."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    step = anybatch.TrainStep(
        model, loss_fn, optimizer, micro_batch_size=3, clip_norm=1.0, scheduler=schedule, recorder=recorder, **options
    )
    for index in range(updates):
        step(torch.randn(8 + index, 3))
    return step


def test_a_function_gets_numbers_once_an_update() -> None:
    seen: list[tuple[int, dict[str, float]]] = []
    stepped(Log(lambda metrics, step: seen.append((step, metrics)), prefix="train/"))
    assert [step for step, _ in seen] == [1, 2, 3, 4]
    first = seen[0][1]
    assert first["train/loss"] == pytest.approx(first["train/loss/mean"] + first["train/loss/square"])
    assert first["train/grad_norm"] > 0
    assert [metrics["train/lr"] for _, metrics in seen] == [0.05, 0.025, 0.0125, 0.00625]  # the next update's
    assert [metrics["train/samples"] for _, metrics in seen] == [8, 17, 27, 38]
    assert {metrics["train/micro_batches"] for _, metrics in seen} == {3, 4}
    assert all(metrics["train/samples_per_second"] > 0 for _, metrics in seen)


def test_every_few_updates_and_all_sinks() -> None:
    seen: list[tuple[str, int]] = []
    stepped(Log(lambda _, step: seen.append(("a", step)), lambda _, step: seen.append(("b", step)), every=2))
    assert seen == [("a", 2), ("b", 2), ("a", 4), ("b", 4)]


def test_batches_that_gave_no_update_are_counted_and_not_logged() -> None:
    seen: list[tuple[int, float]] = []
    model = torch.nn.Linear(3, 3)
    step = anybatch.TrainStep(
        model,
        lambda model, batch: torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"]),
        torch.optim.SGD(model.parameters(), lr=0.1),
        count=lambda batch: (batch["y"] != -100).sum(),
        recorder=Log(lambda metrics, step: seen.append((step, metrics["skipped"]))),
    )
    for label in (0, -100, 1):
        step({"x": torch.randn(4, 3), "y": torch.full((4,), label)})
    assert seen == [(1, 0.0), (2, 1.0)]


def test_a_file_of_lines(tmp_path: Path) -> None:
    stepped(Log(Csv(tmp_path / "log.csv"), every=2))
    with (tmp_path / "log.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["step"] for line in lines] == ["2", "4"]
    assert all(float(line["loss"]) and float(line["samples_per_second"]) > 0 for line in lines)


def test_a_writer_of_tensorboard() -> None:
    class Writer:
        def __init__(self) -> None:
            self.scalars: dict[str, list[tuple[float, int]]] = {}

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.scalars.setdefault(name, []).append((value, step))

        def flush(self) -> None:
            self.flushed = True

    writer = Writer()
    stepped(Log(TensorBoard(writer)))
    assert [step for _, step in writer.scalars["loss"]] == [1, 2, 3, 4]
    assert writer.flushed


def test_files_of_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    stepped(Log(TensorBoard(tmp_path)))
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert [event.step for event in found.Scalars("loss")] == [1, 2, 3, 4]


def test_a_run_of_weights_and_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[dict[str, float], int]] = []
    run = types.SimpleNamespace(log=lambda metrics, step: logged.append((metrics, step)))
    asked: list[dict[str, Any]] = []

    def begin(**options: Any) -> Any:
        asked.append(options)
        return run

    module = types.SimpleNamespace(init=begin)
    monkeypatch.setitem(sys.modules, "wandb", module)
    stepped(Log(WandB(project="anybatch")))
    stepped(Log(WandB(run)), updates=1)
    assert asked == [{"project": "anybatch"}]
    assert [step for _, step in logged] == [1, 2, 3, 4, 1]
    assert "grad_norm" in logged[0][0]


@pytest.mark.parametrize(
    ("module", "make", "text"),
    [
        ("wandb", lambda folder: WandB(project="p"), "pip install wandb"),
        ("torch.utils.tensorboard", TensorBoard, "pip install tensorboard"),
    ],
)
def test_what_is_not_installed_is_said(
    module: str, make: Any, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=text):
        make(tmp_path)


@pytest.mark.parametrize("wrong", [{"every": 0}, {"every": True}, {"every": 1.5}])
def test_wrong_intervals_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(anybatch.BatchError, match="every="):
        Log(**wrong)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(anybatch.BatchError, match="sink"):
        Log("loss.csv")  # type: ignore[arg-type]


def test_a_log_and_a_doctor_together() -> None:
    seen: list[int] = []
    doctor = anybatch.Doctor()
    stepped(Observers(Log(lambda _, step: seen.append(step)), doctor))
    doctor.close()
    assert seen == [1, 2, 3, 4]
    assert doctor.run.steps == 4


def test_other_ranks_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anybatch.integrations.loggers.is_first_rank", lambda: False)
    stepped(Log(lambda _, step: pytest.fail("another rank logged")))


def test_progress_in_a_pipe_is_lines() -> None:
    said = io.StringIO()
    with ProgressBar(total=4, seconds=0, console=Console(file=said, width=80)) as bar:
        stepped(bar)
    lines = said.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == [f"update {n}/4" for n in (1, 2, 3, 4)]
    assert "\x1b" not in said.getvalue()


def test_progress_in_a_terminal_is_a_bar() -> None:
    said = io.StringIO()
    with ProgressBar(total=4, seconds=0, console=Console(file=said, width=80, force_terminal=True)) as bar:
        stepped(bar)
    assert "4/4" in said.getvalue()


def test_progress_waits_for_the_device_now_and_then_only() -> None:
    said = io.StringIO()
    with ProgressBar(seconds=3600, console=Console(file=said)) as bar:
        stepped(bar)
    assert said.getvalue() == ""
    with pytest.raises(anybatch.BatchError, match="total=0"):
        ProgressBar(total=0)

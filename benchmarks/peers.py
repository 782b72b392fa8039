"""Accelerate and Lightning, used as their documentation tells to: ``accumulate()`` and ``accumulate_grad_batches``.

Both are optional. ``reason`` says why a peer can't run here; the benchmarks then leave it out and say so.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

NAMES = ("accelerate", "lightning")

Captured = Callable[[], None]
PeerLoss = Callable[[nn.Module, dict[str, Tensor]], Tensor]


def version(name: str) -> str:
    """Gives the installed version of a peer, or ``not installed``."""
    if reason(name):
        return "not installed"
    for distribution in (name, f"pytorch-{name}"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def reason(name: str) -> str:
    """Says why the peer can't be imported; empty when it can."""
    try:
        _package(name)
    except ImportError as error:
        return f"{error} (pip install {name})"
    return ""


def _package(name: str) -> Any:
    # The import is late and by name: the benchmarks run, and are type-checked, without the peers.
    if name == "accelerate":
        return importlib.import_module("accelerate")
    try:
        return importlib.import_module("lightning.pytorch")
    except ImportError as error:
        try:
            return importlib.import_module("pytorch_lightning")
        except ImportError:
            raise error from None


class AccelerateLoop:
    """The loop of Accelerate's guide to gradient accumulation.

    Args:
        model: the model; it is prepared in place.
        loss_fn: the mean loss of a micro-batch.
        optimizer: its optimizer.
        feed: a ``DataLoader`` over micro-batches (prepared), or any iterable of batches that are already there.
        window: micro-batches for each update.
        clip_norm: the largest norm of the gradient, or None.
        device: the device type to run on.
        before_step: called when the gradient of an update is complete.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: PeerLoss,
        optimizer: torch.optim.Optimizer,
        feed: Iterable[dict[str, Tensor]],
        *,
        window: int,
        clip_norm: float | None,
        device: torch.device,
        before_step: Captured | None = None,
    ) -> None:
        accelerate = _package("accelerate")
        state = importlib.import_module("accelerate.state")
        # The states are shared by all Accelerators of a process; each loop here stands for a process of its own.
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
        self.accelerator = accelerate.Accelerator(gradient_accumulation_steps=window, cpu=device.type == "cpu")
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        if isinstance(feed, torch.utils.data.DataLoader):
            feed = self.accelerator.prepare(feed)
        self.feed, self.loss_fn, self.window = feed, loss_fn, window
        self.clip_norm, self.before_step = clip_norm, before_step
        self.batches = iter(feed)

    def run(self, steps: int) -> None:
        """Makes ``steps`` updates."""
        for _ in range(steps * self.window):
            self._micro(next(self.batches))

    def epoch(self) -> None:
        """Goes through the feed once."""
        for batch in self.feed:
            self._micro(batch)

    def _micro(self, batch: dict[str, Tensor]) -> None:
        with self.accelerator.accumulate(self.model):
            loss = self.loss_fn(self.model, batch)
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients:
                if self.clip_norm is not None:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip_norm)
                if self.before_step is not None:
                    self.before_step()
            self.optimizer.step()
            self.optimizer.zero_grad()


class LightningLoop:
    """``Trainer.fit`` with automatic optimization, in the Trainer's own mode for measuring its overhead.

    ``run`` lets the Trainer, which lives in a thread, go on for so many updates, so that other sides can have their
    turn in between. The clocks that are used count the whole process, and only one thread runs at a time.

    Args:
        model: the model.
        loss_fn: the mean loss of a micro-batch.
        optimizer: its optimizer.
        feed: an iterable of micro-batches.
        window: micro-batches for each update.
        clip_norm: the largest norm of the gradient, or None.
        device: the device type to run on.
        before_step: called when the gradient of an update is complete.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: PeerLoss,
        optimizer: torch.optim.Optimizer,
        feed: Iterable[dict[str, Tensor]],
        *,
        window: int,
        clip_norm: float | None,
        device: torch.device,
        before_step: Captured | None = None,
    ) -> None:
        lightning = _package("lightning")
        for name in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self.window, self.feed = window, feed
        self.left = 0
        self.error: BaseException | None = None
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.thread: threading.Thread | None = None
        self.module = _lightning_module(lightning, model, loss_fn, optimizer, before_step)
        self.gate = _gate(lightning, self)
        self.closing = False
        self.settings: dict[str, Any] = {
            "accelerator": "gpu" if device.type == "cuda" else "cpu",
            "devices": 1,
            "barebones": True,
            "max_epochs": 1,
            "accumulate_grad_batches": window,
            "gradient_clip_val": clip_norm,
        }
        self.trainer_class = lightning.Trainer

    def epoch(self) -> None:
        """Goes through the feed once."""
        self._fit([])

    def run(self, steps: int) -> None:
        """Makes ``steps`` updates."""
        self.left = steps * self.window
        if self.thread is None:
            self.thread = threading.Thread(target=self._live, daemon=True)
            self.thread.start()
        else:
            self.go.release()
        self.done.acquire()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Ends the Trainer and its thread."""
        self.closing = True
        self.go.release()
        if self.thread is not None:
            self.thread.join()

    def batch_done(self, trainer: Any) -> None:
        """Called by the Trainer after each micro-batch; waits for the next turn when this one is over."""
        self.left -= 1
        if self.left == 0:
            self.done.release()
            self.go.acquire()
            trainer.should_stop = self.closing

    def _live(self) -> None:
        try:
            self._fit([self.gate])
        except BaseException as error:  # noqa: BLE001 - it is raised again in the thread that called run
            self.error = error
        self.done.release()

    def _fit(self, callbacks: list[Any]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.trainer_class(callbacks=callbacks, **self.settings).fit(self.module, self.feed)


def _lightning_module(
    lightning: Any, model: nn.Module, loss_fn: PeerLoss, optimizer: torch.optim.Optimizer, before_step: Captured | None
) -> Any:
    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return loss_fn(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    class Capturing(Module):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            if before_step is not None:
                before_step()

    return Module() if before_step is None else Capturing()


def _gate(lightning: Any, loop: LightningLoop) -> Any:
    class Gate(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            loop.batch_done(trainer)

    return Gate()

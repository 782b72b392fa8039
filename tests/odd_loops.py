"""An ordinary loop whose steps are all alike, but for the odd one."""

import torch
import torch.nn.functional as F
from torch import nn

from anybatch import Doctor

STEPS = 60


class Stopped(Exception):
    """Raised in the middle of a step, and caught by the user's loop."""


class Loop:
    """An ordinary loop whose steps are all alike, but for what ``odd`` names.

    Args:
        odd: what is different, by step.
        parts: micro-batches of a step.
        clears: ``"before"`` the forward, ``"after"`` it, ``"last"`` behind the step, or ``"never"``.
        clips: whether it clips gradients and has a schedule.
        scales: whether it has a ``GradScaler``; ``"unscaled"`` before it clips, ``"fused"`` for an optimizer that is
            given the scale itself.
    """

    def __init__(
        self,
        odd: dict[int, str],
        *,
        parts: int = 1,
        clears: str = "after",
        to_none: bool = True,
        clips: bool = False,
        scales: str = "",
    ) -> None:
        self.odd, self.parts, self.clears, self.to_none, self.clips = odd, parts, clears, to_none, clips
        self.scales = scales
        torch.manual_seed(0)
        self.norm, last = nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.inner = nn.Sequential(nn.Linear(4, 6), self.norm)
        self.model = nn.Sequential(self.inner, nn.ReLU(), last)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9, fused=scales == "fused")
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=23, enabled=bool(scales))
        self.scaler.scale(torch.ones(()))
        self.other = torch.optim.SGD([last.weight], lr=1e-4)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.99**step) if clips else None
        self.doctor: Doctor | None = None

    def __call__(self, doctor: Doctor) -> None:
        self.doctor = doctor
        for step in range(STEPS):
            try:
                self.step(self.odd.get(step, ""))
            except Stopped:
                continue

    def clear(self, odd: str) -> None:
        if odd == "clears by hand":
            for parameter in self.model.parameters():
                parameter.grad = None
        elif odd == "clears the model":
            self.model.zero_grad()
        elif odd != "does not clear":
            self.optimizer.zero_grad(set_to_none=self.to_none)

    def loss(self, odd: str) -> torch.Tensor:
        inputs, labels = torch.randn(8, 4), torch.randint(3, (8,))
        if odd == "a smaller batch":
            inputs, labels = inputs[:5], labels[:5]
        if odd == "a tuple of inputs":
            self.inner(inputs)
        with torch.set_grad_enabled(odd != "no gradient"):
            output: torch.Tensor = self.model(inputs)
        if odd == "another loss":
            return F.mse_loss(output, torch.zeros_like(output))
        if odd == "a second loss":
            return F.cross_entropy(output, labels) + F.mse_loss(output, torch.zeros_like(output))
        if odd == "a loss without a function":
            return output.square().mean()
        return F.cross_entropy(output, labels) * (float("nan") if odd == "a loss that is not finite" else 1.0)

    def step(self, odd: str) -> None:
        if odd == "is skipped":
            return
        if odd == "evaluation":
            self.model.eval()
            with torch.no_grad():
                F.cross_entropy(self.model(torch.randn(8, 4)), torch.randint(3, (8,)))
            self.model.train()
        if odd == "without gradient":
            with torch.no_grad():
                self.model(torch.randn(8, 4))
        if odd == "in evaluation mode":
            self.model.eval()
        if self.clears == "before":
            self.clear(odd)
        for part in range(self.parts + (odd == "one part more")):
            loss = self.loss(odd)
            if odd == "stops after the forward":
                raise Stopped
            if self.clears == "after" and part == 0:
                self.clear(odd)
            self.backward(loss, odd)
        self.update(odd)
        if self.clears == "last":
            self.clear(odd)
        if self.schedule is not None and odd != "no schedule":
            for _ in range(1 + (odd == "schedules twice")):
                self.schedule.step()
        self.model.train()

    def backward(self, loss: torch.Tensor, odd: str) -> None:
        if odd not in ("no backward", "no gradient"):
            scaled = self.scaler.scale(loss) if odd != "is not scaled" else loss
            if odd == "overflows":
                scaled = scaled * float("inf")
            if odd == "scales for nothing":
                self.scaler.scale(loss)
            scaled.backward(retain_graph=odd == "keeps the graph")
        if odd == "backward twice":
            self.loss("").backward()
        if odd == "stops after the backward":
            raise Stopped

    def update(self, odd: str) -> None:
        unscales = self.scales == "unscaled" and odd not in ("does not unscale", "no backward", "no gradient")
        if unscales:
            self.scaler.unscale_(self.optimizer)
        if self.clips or odd == "clips":
            self.clip(odd)
        if odd == "drops its gradients":
            for parameter in self.model.parameters():
                parameter.grad = None
        if odd == "is looked at":
            assert self.doctor is not None
            assert self.doctor.run.steps
        if odd == "another learning rate":
            self.optimizer.param_groups[0]["lr"] = 2e-3
        if odd == "another optimizer":
            self.other.step()
        if odd == "a closure":
            self.optimizer.step(lambda: self.loss(""))
        elif odd == "steps without the scaler":
            self.optimizer.step()
        elif odd != "no step" and not (self.scales and odd in ("no backward", "no gradient", "drops its gradients")):
            self.scaler.step(self.optimizer)
            unscales = bool(self.scales)
        if unscales:
            self.scaler.update(2.0**8 if odd == "another scale" else None)

    def clip(self, odd: str) -> None:
        if odd == "clips by value":
            nn.utils.clip_grad_value_(self.model.parameters(), 0.1)
        elif odd != "does not clip":
            model = self.inner if odd == "clips fewer" else self.model
            nn.utils.clip_grad_norm_(model.parameters(), 0.5 if odd == "another limit" else 1.0)


ODD = (
    *("clears by hand", "clears the model", "does not clear", "a smaller batch", "a tuple of inputs", "another loss"),
    *("a second loss", "a loss without a function", "a loss that is not finite", "is skipped", "evaluation"),
    *("without gradient", "in evaluation mode", "one part more", "stops after the forward", "no backward"),
    *("keeps the graph", "backward twice", "stops after the backward", "clips", "is looked at"),
    *("another learning rate", "another optimizer", "a closure", "no step", "no gradient"),
    *("drops its gradients", "clips by value", "does not clip", "clips fewer", "another limit", "no schedule"),
    "schedules twice",
)
OF_SCALERS = (
    *("is not scaled", "overflows", "scales for nothing", "does not unscale", "steps without the scaler"),
    "another scale",
)

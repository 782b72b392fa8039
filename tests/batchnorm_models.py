"""A residual network with 17 BatchNorms, and how the tests and the benchmark of BatchNorm compare steps."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch

Norm = Callable[[int], nn.Module]


class BasicBlock(nn.Module):
    """Two convolutions, each with a BatchNorm, and a shortcut that has none."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = norm(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Conv2d(inputs, outputs, 1, stride=stride) if stride > 1 or inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        kept = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        y: Tensor = self.relu(self.bn2(self.conv2(out)) + kept)
        return y


class ResNet(nn.Module):
    """A residual network for small images (He et al. 2016), with 17 BatchNorms in 8 blocks and none in shortcuts.

    Args:
        widths: channels of the stages.
        norm: makes the BatchNorm of a number of channels.
        classes: outputs.
        depths: blocks of the stages: as in ResNet-18, or (3, 3, 2) for three stages as on CIFAR.
    """

    def __init__(
        self,
        widths: Sequence[int] = (2, 3, 4, 4),
        norm: Norm = nn.BatchNorm2d,
        classes: int = 5,
        depths: Sequence[int] = (2, 2, 2, 2),
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 3, padding=1, bias=False), norm(widths[0]), nn.ReLU(inplace=True)
        )
        before = [widths[0], *widths[:-1]]
        for stage, (inputs, outputs) in enumerate(zip(before, widths, strict=True)):
            blocks = [BasicBlock(inputs, outputs, 2 if stage else 1, norm)]
            blocks += [BasicBlock(outputs, outputs, 1, norm) for _ in range(depths[stage] - 1)]
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(widths[-1], classes)

    @property
    def stages(self) -> list[nn.Module]:
        """The runs of blocks."""
        return [module for name, module in self.named_children() if name.startswith("layer")]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        out: Tensor = self.fc(x.mean((2, 3)))
        return out


def pictures(rows: int = 8, side: int = 8, classes: int = 5, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Images whose mean and spread are not those that running statistics begin with, and classes."""
    return {"x": 2 * torch.randn(rows, 3, side, side, dtype=dtype) + 1, "y": torch.randint(0, classes, (rows,))}


def image_loss(model: Any, batch: Any) -> Tensor:
    """The mean cross-entropy."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def norms_of(model: nn.Module) -> list[Any]:
    """The modules with BatchNorm, by type."""
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


def plain(model: nn.Module, loss_fn: Any, batch: Any, steps: int = 1) -> dict[str, Any]:
    """What forward and backward of the whole batch leave, on a copy of the model."""
    model = copy.deepcopy(model)
    for _ in range(steps):
        model.zero_grad()
        torch.manual_seed(7)
        loss_fn(model, batch).backward()
    return left(model)


def stepped(model: nn.Module, loss_fn: Any, batch: Any, steps: int = 1, **options: Any) -> dict[str, Any]:
    """What ``TrainStep`` leaves, on a copy of the model; the weights stay as they are."""
    model = copy.deepcopy(model)
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.0), **options)
    for _ in range(steps):
        torch.manual_seed(7)
        step(batch)
    return left(model)


def left(model: nn.Module) -> dict[str, Any]:
    """The gradients and the buffers of a model, by name."""
    found: dict[str, Any] = {f"gradient {name}": p.grad for name, p in model.named_parameters()}
    return found | {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}


def assert_bitwise(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Asserts that gradients and buffers are equal in every bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] is None) == (value is None), name
        assert value is None or torch.equal(found[name], value), name


def error_of(found: dict[str, Any], expected: dict[str, Any], kind: str = "gradient") -> float:
    """The relative error in the L2 norm, over all gradients or all running statistics together."""
    names = [name for name, value in expected.items() if name.startswith(kind) and value is not None]
    names = [name for name in names if expected[name].is_floating_point()]
    off = sum(float((found[n].double() - expected[n].double()).square().sum()) for n in names)
    size = sum(float(expected[n].double().square().sum()) for n in names)
    return float((off / size) ** 0.5)

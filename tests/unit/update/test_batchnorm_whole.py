"""BatchNorm in a whole batch that is recomputed or offloaded: every bit of gradient and statistics, counted once."""

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import anybatch
from anybatch.records.plans import Plan, PlanRow
from batchnorm_models import (
    BasicBlock,
    ResNet,
    assert_bitwise,
    image_loss,
    left,
    norms_of,
    pictures,
    plain,
    stepped,
)

ROWS = 6
BLOCKS = ("stem.0:3", *(f"layer{stage}.{index}" for stage in range(1, 5) for index in range(2)))
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "blocks recomputed": {"recompute": BLOCKS},
    "stages recomputed": {"recompute": ("stem.0:3", "layer1.0:2", "layer2.0:2", "layer3.0:2", "layer4.0:2")},
    "norms recomputed": {"recompute": ("stem.1", "layer1.0.bn1", "layer2.1.bn2", "layer3.0.bn1", "layer4.1.bn2")},
    "blocks in blocks": {"recompute": (*BLOCKS, "layer1.0.bn1", "layer2.1.bn1", "layer2.1.bn2")},
    "everything": {"recompute": ("",)},
    "offloaded": {"offload": BLOCKS},
    "both": {"recompute": BLOCKS, "offload": BLOCKS},
}


def plan_of(rows: int = ROWS, **optimizations: Any) -> Plan:
    return Plan(PlanRow(rows, 1, **optimizations), samples=rows)


def assert_whole(found: dict[str, Any], expected: dict[str, Any], steps: int = 1) -> None:
    """Bitwise, and every BatchNorm has counted each step once."""
    assert_bitwise(found, expected)
    counters = [value for name, value in expected.items() if name.endswith("num_batches_tracked")]
    assert all(int(value) == steps for value in counters)


# --- plans -----------------------------------------------------------------------------------------------------------


def test_the_smallest_budget_recomputes_blocks_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    model, batch = ResNet((4, 4, 4, 4)).double(), pictures(16, 16)
    assert len(norms_of(model)) == 17
    possible = anybatch.plan(model, image_loss, batch, torch.optim.SGD(model.parameters()), memory=2**40)
    budget = possible.smallest_bytes
    expected = plain(model, image_loss, batch)
    step = anybatch.TrainStep(model, image_loss, torch.optim.SGD(model.parameters(), lr=0.0), memory=budget)
    out = step(batch)
    assert out.plan is not None
    assert out.plan.recompute
    assert out.plan.chosen.peak_bytes <= budget < possible.whole_bytes
    assert out.micro_batches == 1
    assert_whole(left(model), expected)


def test_a_budget_holds_over_updates() -> None:
    """Weights that move, as in training: after three updates every bit is that of the plain loop."""
    found = []
    for share in (None, 0.9):
        torch.manual_seed(0)
        model, batch = ResNet().double(), pictures(8, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        memory = None
        if share is not None:
            memory = int(share * anybatch.plan(model, image_loss, batch, optimizer, memory=2**40).whole_bytes)
        step = anybatch.TrainStep(model, image_loss, optimizer, memory=memory)
        for _ in range(3):
            out = step(batch)
        assert (out.plan is not None and bool(out.plan.recompute)) == (share is not None)
        found.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    assert_bitwise(found[1], found[0])


# --- kinds of BatchNorm ----------------------------------------------------------------------------------------------

KINDS: dict[str, Any] = {
    "usual": nn.BatchNorm2d,
    "cumulative": functools.partial(nn.BatchNorm2d, momentum=None),
    "not affine": functools.partial(nn.BatchNorm2d, affine=False),
    "no statistics": functools.partial(nn.BatchNorm2d, track_running_stats=False),
    "synchronised": nn.SyncBatchNorm,
    "instances": functools.partial(nn.InstanceNorm2d, affine=True, track_running_stats=True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_norm(kind: str, way: str) -> None:
    torch.manual_seed(0)
    model, batch = ResNet(norm=KINDS[kind]).double(), pictures(ROWS, 16)
    found = stepped(model, image_loss, batch, 2, plan=plan_of(**WAYS[way]))
    if kind == "instances":  # torch does not count their batches
        assert_bitwise(found, plain(model, image_loss, batch, 2))
    else:
        assert_whole(found, plain(model, image_loss, batch, 2), 2)


@pytest.mark.parametrize("way", ["blocks recomputed", "norms recomputed", "everything", "both"])
def test_half_of_the_norms_in_evaluation_mode(way: str) -> None:
    torch.manual_seed(0)
    model, batch = ResNet().double(), pictures(ROWS)
    for norm in norms_of(model)[::2]:
        norm.eval()
        norm.running_mean.uniform_(), norm.running_var.uniform_(0.5, 2)
    assert_bitwise(stepped(model, image_loss, batch, 2, plan=plan_of(**WAYS[way])), plain(model, image_loss, batch, 2))


@pytest.mark.parametrize("way", ["as it is", "blocks recomputed", "blocks in blocks", "both"])
def test_autocast(way: str) -> None:
    torch.manual_seed(0)
    model, batch = ResNet(), pictures(ROWS, dtype=torch.float32)

    def under_autocast(model: Any, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return image_loss(model, batch)

    found = stepped(model, image_loss, batch, 2, plan=plan_of(**WAYS[way]), autocast=torch.bfloat16)
    assert_whole(found, plain(model, under_autocast, batch, 2), 2)


class Points(nn.Module):
    """BatchNorm1d on ``[rows, features]`` and ``[rows, features, points]``."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.each(x.flatten(2)).amax(-1))
        return y


class Volumes(nn.Module):
    """BatchNorm3d."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Conv3d(3, 4, (1, 3, 3)), nn.BatchNorm3d(4), nn.ReLU())
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.each(x.unsqueeze(2)).mean((2, 3, 4)))
        return y


class Shared(nn.Module):
    """One BatchNorm at two places of two blocks, which counts four forwards a step."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm2d(3)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 1), norm, nn.Tanh(), norm) for _ in range(2)))
        self.head = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.blocks(x).mean((2, 3)))
        return y


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (Points, ("each.0:3", "head.0:3")), (Points, ("each.1", "head.1")), (Volumes, ("each.0:3",)),
        (Volumes, ("each",)), (Shared, ("blocks.0", "blocks.1")), (Shared, ("blocks.0:2",)), (Shared, ("blocks.0.1",)),
    ],
    ids=lambda value: value if isinstance(value, tuple) else value.__name__,
)  # fmt: skip
def test_other_shapes_and_a_shared_norm(model: Any, names: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    built, batch = model().double(), pictures(ROWS)
    expected = plain(built, image_loss, batch, 2)
    assert_bitwise(stepped(built, image_loss, batch, 2, plan=plan_of(recompute=names)), expected)
    counts = {int(value) for name, value in expected.items() if name.endswith("num_batches_tracked")}
    assert counts == {8 if model is Shared else 2}


class NormalisedLoss(nn.Module):
    """A loss that is a module with a BatchNorm of its own, checkpointed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5).double()

    def forward(self, model: Any, batch: Any) -> Tensor:
        logits: Tensor = checkpoint(self.norm, model(batch["x"]), use_reentrant=False)
        return F.cross_entropy(logits, batch["y"])


def test_batch_norm_in_a_loss() -> None:
    torch.manual_seed(0)
    model, batch = ResNet().double(), pictures(ROWS)
    losses = [NormalisedLoss(), NormalisedLoss()]
    expected = plain(model, losses[0], batch)
    losses[0] = NormalisedLoss()
    F.cross_entropy(losses[0].norm(copy.deepcopy(model)(batch["x"])), batch["y"]).backward()  # without a checkpoint
    assert_whole(stepped(model, losses[1], batch, plan=plan_of(recompute=BLOCKS)), expected)
    assert_bitwise(dict(losses[1].named_buffers()), dict(losses[0].named_buffers()))


# --- checkpoints in the user's model ---------------------------------------------------------------------------------


class Checkpointed(ResNet):
    """Checkpoints of the user's own, in one of the forms that people write."""

    form = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = self.run(stage, x)
        out: Tensor = self.fc(x.mean((2, 3)))
        return out

    def run(self, stage: Any, x: Tensor) -> Tensor:
        use_reentrant = self.form.startswith("reentrant")
        if self.form.endswith("sequential"):
            y: Tensor = checkpoint_sequential(stage, 2, x, use_reentrant=use_reentrant)
        elif self.form.endswith("nested"):
            y = checkpoint(self.within, stage, x, use_reentrant=use_reentrant)
        else:
            for block in stage:
                x = checkpoint(block, x, use_reentrant=use_reentrant)
            return x
        return y

    def within(self, stage: Any, x: Tensor) -> Tensor:
        for block in stage:
            x = checkpoint(block, x, use_reentrant=self.form.startswith("reentrant"))
        return x


class Inside(BasicBlock):
    """A block with a checkpoint in it, which ends with a BatchNorm, where recomputing stops early."""

    def forward(self, x: Tensor) -> Tensor:
        kept = x if self.downsample is None else self.downsample(x)
        first = checkpoint(lambda x: self.bn1(self.conv1(x)), x, use_reentrant=False)
        second = checkpoint(lambda x: self.bn2(self.conv2(x)), F.relu(first), use_reentrant=False)
        out: Tensor = F.relu(second + kept)
        return out


FORMS = ["blocks", "reentrant blocks", "sequential", "reentrant sequential", "nested", "reentrant nested"]


WARNING = "ignore:None of the inputs have requires_grad=True"  # of a reentrant checkpoint in another one


@pytest.mark.filterwarnings(WARNING)
@pytest.mark.parametrize("way", ["as it is", "blocks recomputed", "norms recomputed", "everything", "offloaded"])
@pytest.mark.parametrize("form", FORMS)
def test_checkpoints_of_the_users_own(form: str, way: str) -> None:
    torch.manual_seed(0)
    model, batch = Checkpointed().double(), pictures(ROWS)
    model.form = form
    bare = ResNet().double()
    bare.load_state_dict(model.state_dict())
    optimizations = WAYS[way]
    if form.startswith("reentrant") and way == "everything":
        pytest.skip("a reentrant checkpoint runs a backward of its own, which a block around it can't follow")
    assert_whole(
        stepped(model, image_loss, batch, 2, plan=plan_of(**optimizations)), plain(bare, image_loss, batch, 2), 2
    )


@pytest.mark.filterwarnings(WARNING)
@pytest.mark.parametrize("policy", ["ghost", "frozen"])
@pytest.mark.parametrize("form", FORMS)
def test_checkpoints_of_the_users_own_in_a_split(form: str, policy: str) -> None:
    torch.manual_seed(0)
    model, batch = Checkpointed().double(), pictures(8)
    model.form = form
    bare = ResNet().double()
    bare.load_state_dict(model.state_dict())
    options = {"micro_batch_size": 4, "batch_norm": policy}
    expected = stepped(bare, image_loss, batch, 2, **options)
    assert_whole(stepped(model, image_loss, batch, 2, **options), expected, 2 if policy == "ghost" else 0)


@pytest.mark.parametrize("names", [(), BLOCKS, ("layer1.0:2", "layer3.0:2"), ("",)], ids=str)
def test_a_checkpoint_inside_of_a_recomputed_block(names: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    bare, batch = ResNet().double(), pictures(ROWS)
    model = ResNet().double()
    model.load_state_dict(bare.state_dict())
    for stage in model.stages:
        for block in stage.children():
            block.__class__ = Inside
    assert_whole(
        stepped(model, image_loss, batch, 2, plan=plan_of(recompute=names)), plain(bare, image_loss, batch, 2), 2
    )


def two_losses(model: Any, batch: Any) -> Any:
    yield "clean", image_loss(model, batch)
    yield "noisy", image_loss(model, {"x": batch["x"] * 2 + 1, "y": batch["y"]})


@pytest.mark.parametrize("form", ["blocks", "nested"])
def test_a_second_forward_after_the_first_backward(form: str) -> None:
    """The statistics of the second forward must begin where the first forward left them, not its recomputation."""
    torch.manual_seed(0)
    model, batch = Checkpointed().double(), pictures(ROWS)
    model.form = form
    bare = ResNet().double()
    bare.load_state_dict(model.state_dict())
    found, expected = stepped(model, two_losses, batch), stepped(bare, two_losses, batch)
    assert_bitwise(found, expected)
    assert all(int(norm) == 2 for name, norm in found.items() if name.endswith("tracked"))


def test_an_error_in_the_backward_leaves_the_statistics_as_before_the_step() -> None:
    torch.manual_seed(0)
    model, batch = Checkpointed().double(), pictures(ROWS)
    model.form = "blocks"
    before = left(model)

    def stop(_: Tensor) -> None:
        raise ValueError("user")

    model.get_parameter("stem.0.weight").register_hook(stop)
    with pytest.raises(ValueError, match="user"):
        anybatch.backward(model, image_loss, batch)
    assert_bitwise(left(model), before)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_a_momentum_that_the_loss_writes_stays() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    def loss_fn(model: Any, batch: Tensor) -> Tensor:
        model[1].momentum *= 0.5
        found: Tensor = model(batch).square().mean()
        return found

    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        step(torch.randn(8, 3))
    assert model[1].momentum == 0.1 / 8

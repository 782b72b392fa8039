"""What a statement computes and throws away."""

import ast

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from anybatch.doctor.ask.calls import thrown_away
from test_doctor_ask import asked, nothing_was_compiled

__all__ = ["nothing_was_compiled"]


def trained() -> None:
    net, (x, y) = nn.Linear(6, 3), (torch.randn(8, 6), torch.arange(8) % 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        scores = net(x)
        scores.masked_fill(x[:, :3] < 0, -1e9)
        loss = F.cross_entropy(scores, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_a_mask_that_nothing_takes_is_told_with_its_call() -> None:
    (told,) = [one for one in asked(trained, "unread field") if one.evidence["kind"] == "result"]
    assert told.evidence["name"] == "scores"
    assert told.evidence["call"] == "scores.masked_fill(x[:, :3] < 0, -1000000000.0)"


@pytest.mark.parametrize(
    "code",
    [
        "np.append(losses, loss)\nplot(losses)",
        "frame.dropna()\nx = torch.tensor(frame)",
        "x.flip(-1)\nnet(x)",
        "scores.softmax(dim=1)\nloss(scores)",
        "h.detach()\nout, h = rnn(x, h)",
        "F.normalize(self.queue)\nscores = q @ self.queue",
        "torch.clamp(batch['x'], 0, 1)\nnet(batch['x'])",
    ],
)
def test_what_changes_a_copy_only(code: str) -> None:
    assert len(list(thrown_away(ast.parse(code)))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "scores.masked_fill_(mask, -1)\nloss(scores)",
        "np.clip(x, 0, 1, out=x)\nnet(x)",
        "F.relu(x, inplace=True)\nnet(x)",
        "frame.dropna(**options)\nx = frame.values",
        "losses.append(loss)\nprint(losses)",
        "names.insert(0, 'x')\nprint(names)",
        "doctor.detach()\ndoctor.report()",
        "logger.log(loss)\nlogger.log(other)",
        "dist.scatter(out, parts)\nnet(out)",
        "import matplotlib.pyplot as plt\nplt.scatter(x, y)\nsave(plt)",
        "ax.scatter(x, y)\nax.legend()",
        "pygame.display.flip()\nrun(pygame.display)",
        "net.softmax(x)\ntrain(net)",
        "module.relu(x)\ntrain(module)",
        "np.clip(x, -3, 3, x)\nnet(x)",
        "np.sqrt(v, w)\nnet(v)",
        "cv2.flip(img, 1, img)\nnet(img)",
        "F.relu(h, True)\nnet(h)",
        "try:\n  x.reshape(2, 3)\nexcept RuntimeError:\n  pass\nnet(x)",
        "with pytest.raises(RuntimeError):\n  x.reshape(2, 3)\nnet(x)",
        "for _ in range(10):\n  torch.softmax(x, -1)\nnet(x)",
        "x.clamp(0, 1)\nx = net(y)\nloss(x)",
        "out = x.clamp(0, 1)\nnet(out)",
    ],
)
def test_what_works_in_place_or_is_read_no_more_is_left_alone(code: str) -> None:
    assert not list(thrown_away(ast.parse(code)))

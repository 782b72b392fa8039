"""Returns that are summed up from the first reward on are told, and sums that are meant so are not."""

import ast

import pytest

from anybatch.doctor.ask.source import forward_sums

LOOP = "for r in {}:\n    R = r + self.gamma * R\n    returns.append(R)\n{}"
TOLD = {
    "rewards": LOOP.format("self.policy.rewards", "returns = (returns - returns.mean()) / returns.std()"),
    "episodes of several": "for r, m in zip(rewards, masks):\n  ret = r + gamma * ret * m\n  out.append(ret)",
    "advantages": "for t in range(n - 1):\n  gae = deltas[t] + gamma * lam * gae\n  adv[t] = gae",
    "the other order": "for i, r in enumerate(rewards):\n  G = gamma * G + r\n  targets[i] = G",
}
MEANT = {
    "reversed": LOOP.format("reversed(rewards)", ""),
    "turned before": "rewards = rewards[::-1]\n" + LOOP.format("rewards", "returns.reverse()"),
    "turned in place": "rewards.reverse()\n" + LOOP.format("rewards", ""),
    "from the end": "for t in range(T - 1, -1, -1):\n  R = rewards[t] + gamma * R\n  returns[t] = R",
    "counted from the end": "for t in range(T):\n  R = rewards[T - 1 - t] + gamma * R\n  returns.append(R)",
    "negative places": "for t in range(T):\n  R = rewards[~t] + gamma * R\n  returns.append(R)",
    "its last first": "episode.insert(0, step)\nfor r in episode:\n  R = rewards(r) + gamma * R\n  returns.append(R)",
    "the spread alone": LOOP.format("rewards", "scale = np.std(returns)"),
    "not kept": "for r in rewards:\n  R = r + gamma * R\nprint(R)",
    "a trace": "for s, r in zip(states, rewards):\n  trace = phi(s) + gamma * lam * trace\n  traces.append(trace)",
    "an average": "for r in rewards:\n  mean = 0.1 * r + 0.9 * mean\n  means.append(mean)",
    "an average by gamma": "for r in rewards:\n  mean = gamma * mean + (1 - gamma) * r\n  means.append(mean)",
    "turned under another name": "rs = rewards.flip(0)\n" + LOOP.format("rs", ""),
    "places from the end": "order = range(T - 1, -1, -1)\n"
    "for t in order:\n  R = rewards[t] + gamma * R\n  returns[t] = R",
    "turned by a function": "def other_way(xs):\n  return xs[::-1]\n" + LOOP.format("other_way(rewards)", ""),
    "given the other way round": "def summed(rewards):\n  for r in rewards:\n    R = r + gamma * R\n    out.append(R)\n"
    "  return out\nreturns = summed(torch.flip(batch['r'], [0]))",
    "sorted": "steps.sort(key=lambda s: -s.t)\nfor s in steps:\n  R = s.reward + gamma * R\n  out.append(R)",
    "a running scale": LOOP.format("rewards", "return_rms.update(np.array(returns))"),
    "a decayed sum of other things": "for x in signal:\n  y = x + discount * y\n  out.append(y)",
}


@pytest.mark.parametrize("name", TOLD)
def test_returns_of_the_past_are_told(name: str) -> None:
    assert len(list(forward_sums(ast.parse(TOLD[name])))) == 1


@pytest.mark.parametrize("name", MEANT)
def test_sums_that_begin_at_the_end_or_are_no_returns_are_not(name: str) -> None:
    assert list(forward_sums(ast.parse(MEANT[name]))) == []

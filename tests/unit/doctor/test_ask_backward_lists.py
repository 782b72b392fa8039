"""Lists that a loop fills from the last step to the first, and that nothing reverses.

How this could alarm without need: the list is reversed elsewhere or in another way, what it is used with has the same
order, only its mean is shown, or the loop discounts nothing.
"""

import ast

import pytest

from anybatch.doctor.ask.source import backward_lists

RETURNS = "R = 0\nfor r in reversed(rewards):\n    R = r + gamma * R\n    returns.append(R)\n"
ADVANTAGES = """
def gae(rewards, values, done):
    advantages, last = [], 0
    for t in range(len(rewards) - 1, -1, -1):
        delta = rewards[t] + 0.99 * values[t + 1] * (1 - done[t]) - values[t]
        last = delta + 0.99 * lam * (1 - done[t]) * last
        advantages.append(last)
    return np.stack(advantages)
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (RETURNS + "loss = -(logs * torch.tensor(returns)).sum()", ["returns"]),
        (RETURNS.replace("reversed(rewards)", "rewards[::-1]") + "learn(returns)", ["returns"]),
        (RETURNS.replace("returns", "self.returns") + "learn(self.returns)", ["self.returns"]),
        (RETURNS + "print(np.mean(returns)); learn(returns)", ["returns"]),
        (ADVANTAGES, ["advantages"]),
        (ADVANTAGES.replace("advantages.append(last)", "advantages.append(last); returns.append(last + values[t])"),
         ["advantages"]),
        (RETURNS + "returns.reverse()", []),
        (RETURNS + "learn(returns[::-1])", []),
        (RETURNS + "learn(torch.tensor(returns).flip(0))", []),
        (RETURNS + "learn(np.flipud(returns))", []),
        (RETURNS + "for s in states: learn(s, returns.pop())", []),
        (RETURNS + "for i in range(n): learn(states[i], returns[n - 1 - i])", []),
        (RETURNS.replace("returns.append(R)", "returns.insert(0, R)") + "learn(returns)", []),
        (RETURNS.replace("returns.append(R)", "batch.append((states.popleft(), R))") + "learn(batch)", []),
        (RETURNS.replace("returns.append(R)", "returns.append(R); seen.append(r)") + "learn(returns, seen)", []),
        (RETURNS.replace("append(R)", "append(-R * logs[t])") + "sum(returns).backward()", []),
        (RETURNS + "print(np.mean(returns), max(returns))", []),
        (RETURNS.replace("gamma * R", "R") + "learn(returns)", []),
        (RETURNS.replace("reversed(rewards)", "rewards") + "learn(returns)", []),
    ],
)  # fmt: skip
def test_lists_that_are_never_reversed_are_told(text: str, found: list[str]) -> None:
    assert [name for name, _ in backward_lists(ast.parse(text))] == found

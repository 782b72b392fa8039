# REINFORCE with a baseline: many walkers at once learn to go to their goal.
import sys

import torch
from torch import nn
from torch.distributions import Categorical


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), nn.Tanh())
        self.actor = nn.Linear(32, 4)

    def forward(self, state):
        return Categorical(logits=self.actor(self.body(state)))


MOVES = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])


def rollout(policy, walkers=48, length=10):
    position, goal = torch.randn(walkers, 2), torch.randn(walkers, 2)
    log_probs, rewards = [], []
    for _ in range(length):
        distribution = policy(torch.cat([position, goal], dim=1))
        action = distribution.sample()
        before = (goal - position).norm(dim=1)
        position = position + 0.3 * MOVES[action]
        rewards.append(before - (goal - position).norm(dim=1))
        log_probs.append(distribution.log_prob(action))
    return torch.stack(log_probs), torch.stack(rewards)


def discounted(rewards, gamma=0.9):
    total, result = torch.zeros(rewards.shape[1]), []
    for reward in reversed(rewards):
        total = reward + gamma * total
        result.insert(0, total)
    return torch.stack(result)


torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
for episode in range(120):
    log_probs, rewards = rollout(policy)
    returns = discounted(rewards)
    advantage = (returns - returns.mean()) / (returns.std() + 1e-8)
    loss = -(log_probs * advantage).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if episode % 30 == 0:
        print(f"episode {episode} reward {rewards.sum(0).mean().item():.3f}")
with torch.no_grad():
    _, rewards = rollout(policy, walkers=500)
print(f"metric {rewards.sum(0).mean().item():.4f}")

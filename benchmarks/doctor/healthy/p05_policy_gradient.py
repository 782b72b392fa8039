# REINFORCE with a learned baseline. The size and the sign of the policy's loss mean nothing.
import argparse

import torch
from torch import nn
from torch.distributions import Categorical


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(4, 32), nn.Tanh())
        self.actor = nn.Linear(32, 3)
        self.baseline = nn.Linear(32, 1)

    def forward(self, state):
        hidden = self.shared(state)
        return Categorical(logits=self.actor(hidden)), self.baseline(hidden).squeeze(-1)


def rollout(policy, length=20):
    state = torch.randn(16, 4)
    log_probs, values, rewards, entropies = [], [], [], []
    for _ in range(length):
        distribution, value = policy(state)
        action = distribution.sample()
        push = (action - 1).float()
        state = 0.9 * state + 0.3 * push[:, None] + 0.1 * torch.randn(16, 4)
        log_probs.append(distribution.log_prob(action))
        entropies.append(distribution.entropy())
        values.append(value)
        rewards.append(-state.mean(1).abs())
    return torch.stack(log_probs), torch.stack(values), torch.stack(rewards), torch.stack(entropies)


def returns(rewards, gamma=0.9):
    total, out = torch.zeros(rewards.shape[1]), []
    for reward in reversed(rewards):
        total = reward + gamma * total
        out.insert(0, total)
    return torch.stack(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    torch.manual_seed(parser.parse_args().seed)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for episode in range(60):
        log_probs, values, rewards, entropies = rollout(policy)
        gained = returns(rewards)
        advantage = (gained - values).detach()
        loss = -(log_probs * advantage).mean() + 0.5 * (values - gained).pow(2).mean() - 0.01 * entropies.mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()
        if episode % 12 == 0:
            print(episode, "loss", round(loss.item(), 4), "reward", round(rewards.mean().item(), 4))

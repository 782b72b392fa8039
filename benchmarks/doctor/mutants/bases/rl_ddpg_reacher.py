# Deterministic policy gradients: actor, critic, and slowly following copies of both.
import copy
import sys

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
GAMMA, TAU = 0.8, 0.02


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(3, 48)
        self.fc2 = nn.Linear(48, 1)

    def forward(self, obs):
        return torch.tanh(self.fc2(F.relu(self.fc1(obs))))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(4, 48)
        self.fc2 = nn.Linear(48, 48)
        self.fc3 = nn.Linear(48, 1)

    def forward(self, obs, action):
        x = torch.cat([obs, action], dim=1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


def move(obs, action):
    place, speed, goal = obs.split(1, dim=1)
    speed = 0.7 * speed + 0.4 * action
    place = place + 0.4 * speed
    return torch.cat([place, speed, goal], dim=1), -(place - goal).abs()


def soft_update(target, source):
    with torch.no_grad():
        for t, s in zip(target.parameters(), source.parameters(), strict=True):
            t.mul_(1 - TAU).add_(s, alpha=TAU)


def fresh(n):
    return torch.cat([torch.randn(n, 1), torch.zeros(n, 1), torch.randn(n, 1)], dim=1)


actor, critic = Actor(), Critic()
actor_target, critic_target = copy.deepcopy(actor), copy.deepcopy(critic)
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=2e-3)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=4e-3)
obs, buffer = fresh(8), []
for step in range(450):
    with torch.no_grad():
        action = (actor(obs) + 0.4 * torch.randn(8, 1)).clamp(-1, 1)
    next_obs, reward = move(obs, action)
    buffer.append(torch.cat([obs, action, reward, next_obs], dim=1))
    obs = fresh(8) if step % 12 == 11 else next_obs
    if step < 30:
        continue
    rows = torch.cat(buffer[-200:])
    batch = rows[torch.randint(len(rows), (48,))]
    s, a, r, s2 = batch[:, :3], batch[:, 3:4], batch[:, 4:5], batch[:, 5:]
    with torch.no_grad():
        target = r + GAMMA * critic_target(s2, actor_target(s2))
    critic_loss = F.mse_loss(critic(s, a), target)
    critic_optimizer.zero_grad()
    critic_loss.backward()
    critic_optimizer.step()
    actor_loss = -critic(s, actor(s)).mean()
    actor_optimizer.zero_grad()
    actor_loss.backward()
    actor_optimizer.step()
    soft_update(critic_target, critic)
    soft_update(actor_target, actor)
    if step % 90 == 0:
        print(f"{step} critic {critic_loss.item():.4f} actor {actor_loss.item():.4f}")
with torch.no_grad():
    obs, total = fresh(300), 0.0
    for _ in range(12):
        obs, reward = move(obs, actor(obs))
        total += reward.mean().item()
print(f"metric {total / 12:.4f}")

# Proximal policy optimisation on a small balancing task that runs as tensors.
import sys

import torch
import torch.nn as nn
from torch.distributions import Normal


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
        self.actor_mean = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
        self.actor_logstd = nn.Parameter(torch.full((1,), -0.5))

    def get_value(self, obs):
        return self.critic(obs).squeeze(-1)

    def get_action(self, obs, action=None):
        dist = Normal(self.actor_mean(obs).squeeze(-1), self.actor_logstd.exp())
        if action is None:
            action = dist.sample()
        return action, dist.log_prob(action), dist.entropy()


def advance(obs, action):
    angle, speed = obs.unbind(-1)
    speed = 0.95 * speed + 0.2 * angle + 0.2 * action.clamp(-2, 2)
    angle = angle + 0.2 * speed
    reward = -(angle**2 + 0.1 * speed**2).clamp(max=4)
    return torch.stack([angle.clamp(-3, 3), speed.clamp(-3, 3)], dim=-1), reward


def collect(agent, steps=16, envs=32):
    obs = torch.randn(envs, 2) * 0.6
    seen = {"obs": [], "actions": [], "logprobs": [], "rewards": [], "values": []}
    with torch.no_grad():
        for _ in range(steps):
            action, logprob, _ = agent.get_action(obs)
            following, reward = advance(obs, action)
            for name, value in zip(seen, (obs, action, logprob, reward, agent.get_value(obs)), strict=True):
                seen[name].append(value)
            obs = following
        last_value = agent.get_value(obs)
    seen = {name: torch.stack(values) for name, values in seen.items()}
    advantages, running = torch.zeros_like(seen["rewards"]), 0
    for t in reversed(range(steps)):
        next_value = seen["values"][t + 1] if t + 1 < steps else last_value
        delta = seen["rewards"][t] + 0.9 * next_value - seen["values"][t]
        running = delta + 0.9 * 0.95 * running
        advantages[t] = running
    seen["advantages"], seen["returns"] = advantages, advantages + seen["values"]
    return {name: value.flatten(0, 1) for name, value in seen.items()}


def update(agent, optimizer, data):
    for _ in range(3):
        for idx in torch.randperm(len(data["obs"])).chunk(3):
            _, logprob, entropy = agent.get_action(data["obs"][idx], data["actions"][idx])
            ratio = (logprob - data["logprobs"][idx]).exp()
            adv = data["advantages"][idx]
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            pg_loss = torch.max(-adv * ratio, -adv * ratio.clamp(0.8, 1.2)).mean()
            v_loss = 0.5 * (agent.get_value(data["obs"][idx]) - data["returns"][idx]).pow(2).mean()
            loss = pg_loss - 0.001 * entropy.mean() + 0.5 * v_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    return loss.item()


if __name__ == "__main__":
    torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3, eps=1e-5)
    for iteration in range(28):
        data = collect(agent)
        loss = update(agent, optimizer, data)
        if iteration % 7 == 0:
            print(f"iteration {iteration} reward {data['rewards'].mean().item():.3f} loss {loss:.3f}")
    print(f"metric {collect(agent, envs=300)['rewards'].mean().item():.4f}")

# Actor and critic on a contextual bandit. After public reports: encode-attend-navigate#2, Gymnasium#1494.
import argparse

import torch
from torch import nn
from torch.distributions import Categorical

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--updates", type=int, default=100)
parser.add_argument("--fixed", action="store_true", help="run the repaired version")
args = parser.parse_args()
torch.manual_seed(args.seed)

actor = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4))
critic = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-3)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3)

for update in range(args.updates):
    state = torch.randn(64, 6)
    policy = Categorical(logits=actor(state))
    action = policy.sample()
    reward = state.gather(1, action[:, None]).squeeze(1) + 2.0
    value = critic(state).squeeze(1)
    advantage = reward - value
    if args.fixed:
        advantage = advantage.detach()
    actor_loss = -(policy.log_prob(action) * advantage).mean()
    critic_loss = (value - reward).pow(2).mean()

    actor_optimizer.zero_grad()
    critic_optimizer.zero_grad()
    actor_loss.backward(retain_graph=True)
    critic_loss.backward()
    actor_optimizer.step()
    critic_optimizer.step()
    if update % 20 == 0:
        print(f"{update} reward {reward.mean().item():.3f} critic {critic_loss.item():.3f}")

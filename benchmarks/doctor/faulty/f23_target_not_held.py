# Q-learning on a chain of states with one network. After public reports: deep-learning-from-scratch-4#13,
# OpenNMT-py#403.
import argparse
import random

import torch
from torch import nn


class QNet(nn.Module):
    def __init__(self, states, actions):
        super().__init__()
        self.l1 = nn.Linear(states, 50)
        self.l2 = nn.Linear(50, actions)

    def forward(self, x):
        return self.l2(torch.relu(self.l1(x)))


class Agent:
    def __init__(self, fixed, gamma=0.95, lr=0.05):
        self.fixed = fixed
        self.gamma = gamma
        self.qnet = QNet(8, 2)
        self.optimizer = torch.optim.SGD(self.qnet.parameters(), lr=lr)

    def act(self, state, epsilon=0.3):
        if random.random() < epsilon:
            return random.randrange(2)
        with torch.no_grad():
            return self.qnet(state[None]).argmax().item()

    def update(self, state, action, reward, next_state, done):
        next_q = self.qnet(next_state[None]).max(1).values
        if self.fixed:
            next_q = next_q.detach()
        else:
            next_q.detach()
        target = reward + (1.0 - done) * self.gamma * next_q
        q = self.qnet(state[None])[:, action]
        loss = nn.functional.mse_loss(q, target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def one_hot(k):
    return torch.eye(8)[k]


def play(agent, episodes):
    for episode in range(episodes):
        at, total = 0, 0.0
        for _ in range(12):
            action = agent.act(one_hot(at))
            after = max(0, min(7, at + (1 if action else -1)))
            done = float(after == 7)
            total += agent.update(one_hot(at), action, done, one_hot(after), done)
            at = after
            if done:
                break
        if episode % 5 == 0:
            print(episode, "loss", total)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fixed", action="store_true", help="run the repaired version")
    args = parser.parse_args()
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    agent = Agent(args.fixed)
    play(agent, 25)
    with torch.no_grad():
        print("values", agent.qnet(torch.eye(8)).max(1).values.tolist())

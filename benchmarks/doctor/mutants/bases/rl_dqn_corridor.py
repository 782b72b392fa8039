# Deep Q learning in a corridor with a trap, with a replay memory and a target network.
import argparse
import copy
import random
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
random.seed(args.seed)
torch.manual_seed(args.seed)
LENGTH, GAMMA = 8, 0.9


class Corridor:
    def reset(self):
        self.place, self.time = random.randrange(1, LENGTH - 1), 0
        self.side = random.choice((0, LENGTH - 1))
        return self.state()

    def state(self):
        state = torch.zeros(LENGTH + 1)
        state[self.place] = 1.0
        state[LENGTH] = 1.0 if self.side else -1.0
        return state

    def step(self, action):
        self.place += 1 if action == 1 else -1
        self.time += 1
        ended = self.place in (0, LENGTH - 1)
        reward = (1.0 if self.place == self.side else -1.0) if ended else -0.02
        return self.state(), reward, ended or self.time >= 30


class QNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(LENGTH + 1, 32)
        self.fc2 = nn.Linear(32, 2)

    def forward(self, state):
        return self.fc2(F.relu(self.fc1(state)))


q_network = QNetwork()
target_network = copy.deepcopy(q_network)
optimizer = torch.optim.Adam(q_network.parameters(), lr=3e-3)
memory = deque(maxlen=2000)
env = Corridor()
state = env.reset()
for step in range(1200):
    epsilon = max(0.1, 1 - step / 500)
    if random.random() < epsilon:
        action = random.randrange(2)
    else:
        with torch.no_grad():
            action = int(q_network(state).argmax())
    next_state, reward, done = env.step(action)
    memory.append((state, action, reward, next_state, float(done)))
    state = env.reset() if done else next_state
    if len(memory) < 100 or step % 3:
        continue
    states, actions, rewards, next_states, dones = zip(*random.sample(memory, 32), strict=True)
    states, next_states = torch.stack(states), torch.stack(next_states)
    actions, rewards, dones = torch.tensor(actions), torch.tensor(rewards), torch.tensor(dones)
    values = q_network(states).gather(1, actions.unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        best = target_network(next_states).max(dim=1).values
        targets = rewards + GAMMA * best * (1 - dones)
    loss = F.smooth_l1_loss(values, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 60 == 0:
        target_network.load_state_dict(q_network.state_dict())
total = 0.0
for _ in range(60):
    state, done = env.reset(), False
    while not done:
        with torch.no_grad():
            state, reward, done = env.step(int(q_network(state).argmax()))
        total += reward
print(f"metric {total / 60:.4f}")

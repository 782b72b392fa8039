# Classifies videos whose frames come as time, rows, features. After public reports: video-classification#42,
# Speech-Separation#4.
import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fixed", action="store_true", help="run the repaired version")
args = parser.parse_args()
torch.manual_seed(args.seed)


class FramesThenTime(nn.Module):
    def __init__(self):
        super().__init__()
        self.frame_encoder = nn.Sequential(nn.Linear(12, 24), nn.ReLU())
        self.time_encoder = nn.GRU(24, 24, batch_first=True)
        self.answer = nn.Linear(24, 3)

    def forward(self, video):
        rows, frames, _ = video.shape
        encoded = torch.stack([self.frame_encoder(video[:, t]) for t in range(frames)])
        if args.fixed:
            encoded = encoded.transpose(0, 1)
        else:
            encoded = encoded.view(rows, frames, -1)
        _, last = self.time_encoder(encoded)
        return self.answer(last[0])


net = FramesThenTime()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
cost = nn.CrossEntropyLoss()
for step in range(100):
    action = torch.randint(3, (32,))
    video = torch.randn(32, 6, 12) * 0.5
    video[torch.arange(32), :, action] += 1.0
    loss = cost(net(video), action)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(step, round(loss.item(), 4))

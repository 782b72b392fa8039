# Trains a fusion model and looks at a validation set now and then. After a public report: MultiBench#26.
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

p = argparse.ArgumentParser()
p.add_argument("--seed", type=int, default=0)
p.add_argument("--fixed", action="store_true", help="run the repaired version")
flags = p.parse_args()
torch.manual_seed(flags.seed)


class Fusion(nn.Module):
    def __init__(self):
        super().__init__()
        self.audio = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.video = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.drop = nn.Dropout(0.4)
        self.head = nn.Linear(64, 1)

    def forward(self, audio, video):
        joined = torch.cat([self.audio(audio), self.video(video)], dim=1)
        return self.head(self.drop(joined)).flatten()


sound, picture = torch.randn(900, 12), torch.randn(900, 20)
rating = sound[:, 0] * 2 + picture[:, 1] - picture[:, 2] + 0.1 * torch.randn(900)
train_data, valid_data = random_split(TensorDataset(sound, picture, rating), [700, 200])
train_batches = DataLoader(train_data, batch_size=50, shuffle=True)
valid_batches = DataLoader(valid_data, batch_size=50)

fusion = Fusion()
optimizer = torch.optim.RMSprop(fusion.parameters(), lr=1e-3)
criterion = nn.MSELoss()
for epoch in range(6):
    fusion.train()
    for a, v, r in train_batches:
        optimizer.zero_grad()
        loss = criterion(fusion(a, v), r)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        if flags.fixed:
            fusion.eval()
        else:
            fusion.train()
        valid_loss = sum(criterion(fusion(a, v), r).item() for a, v, r in valid_batches) / len(valid_batches)
        mean = fusion.audio[1].running_mean.mean().item()
    print(f"epoch {epoch} train {loss.item():.4f} valid {valid_loss:.4f} running mean {mean:.5f}")

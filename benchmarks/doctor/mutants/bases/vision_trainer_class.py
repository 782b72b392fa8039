# A trainer class with a validation set: it keeps the weights that were best and restores them at the end.
import argparse
import copy

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, hidden=96):
        super().__init__()
        self.fc1 = nn.Linear(64, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, 10)

    def forward(self, x):
        x = F.relu(self.fc1(x))
        x = F.dropout(x, 0.2, training=self.training)
        x = F.relu(self.fc2(x))
        return self.out(x)


class Trainer:
    def __init__(self, model, train_loader, val_loader, lr=2e-3):
        self.model = model
        self.train_loader = train_loader
        self.val_loader = val_loader
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=4, gamma=0.5)
        self.best = 0.0
        self.best_state = None

    def train_epoch(self):
        self.model.train()
        total = 0.0
        for inputs, labels in self.train_loader:
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(inputs), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            total += loss.item()
        return total / len(self.train_loader)

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        right = sum((self.model(inputs).argmax(dim=1) == labels).sum().item() for inputs, labels in self.val_loader)
        return right / len(self.val_loader.dataset)

    def fit(self, epochs):
        for epoch in range(epochs):
            loss = self.train_epoch()
            score = self.validate()
            self.scheduler.step()
            if score > self.best:
                self.best = score
                self.best_state = copy.deepcopy(self.model.state_dict())
            print(f"epoch {epoch}: loss {loss:.3f}, accuracy {score:.3f}")
        self.model.load_state_dict(self.best_state)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images).float() / 16, torch.tensor(labels)
    perm = torch.randperm(len(images))
    images, labels = images[perm], labels[perm]
    train = DataLoader(TensorDataset(images[:1400], labels[:1400]), batch_size=64, shuffle=True)
    val = DataLoader(TensorDataset(images[1400:], labels[1400:]), batch_size=200)
    trainer = Trainer(Net(), train, val)
    trainer.fit(8)
    print(f"metric {trainer.validate():.4f}")


if __name__ == "__main__":
    main()

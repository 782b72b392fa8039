import torch, torch.nn.functional as F

torch.manual_seed(0)
m = torch.nn.Linear(4, 3)
o = torch.optim.SGD(m.parameters(), 0.1)
h = torch.nn.Linear(4, 1)
for i in range(3):
    x = torch.randn(8, 4)
    y = torch.randint(0, 3, (8,))
    o.zero_grad()
    l1 = F.cross_entropy(m(x), y)
    l1.backward()
    l2 = F.mse_loss(h(x), torch.randn(8, 1))
    l2.backward()
    o.step()

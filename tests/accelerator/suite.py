"""The tests of the engine on the test accelerator: whatever they make lies there, since it is the default device."""

import torch

from accelerator import sim

sim.load()
torch.set_default_device("sim")

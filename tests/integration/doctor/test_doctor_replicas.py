"""Models that are spread over processes: which are called past their wrapper."""

import sys
from pathlib import Path

import pytest

import forked_python
from sharding_models import runs_on_cpu

SCRIPT = """
import sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
import torch.multiprocessing as mp
from anybatch.doctor.recorder import Doctor
from anybatch.records.lossfacts import Replicas

def work(rank, world, call, file):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    net = torch.nn.Linear(3, 2)
    ddp = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with Doctor() as doctor:
        for _ in range(3):
            optimizer.zero_grad()
            called = {"wrapper": ddp, "inner": net, "attribute": ddp.module}[call]
            called(torch.ones(4, 3)).mean().backward()
            optimizer.step()
            with torch.no_grad():
                ddp.module(torch.ones(4, 3))
    if rank == 0:
        facts = list(doctor.run.of(Replicas))
        print(doctor.failure, [(f.world, f.wrapper, f.bypassed) for f in facts], [f.name for f in doctor.findings])
    dist.destroy_process_group()

mp.start_processes(work, args=(2, sys.argv[1], sys.argv[2]), nprocs=2, start_method="fork")
"""


@pytest.mark.parametrize("call", ["wrapper", "inner"])
def test_a_model_that_is_called_past_its_wrapper(tmp_path: Path, call: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = forked_python.run([sys.executable, str(script), call, str(tmp_path / "meet")], tmp_path)
    assert done.returncode == 0, done.stderr
    bypassed = "('net',)" if call == "inner" else "()"
    assert f"[(2, 'DistributedDataParallel', {bypassed})]" in done.stdout
    assert ("DDP_BYPASSED" in done.stdout) == (call == "inner")
    assert done.stdout.startswith(" [(")


SHARDED = """
import sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from anybatch.doctor.recorder import Doctor

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
for one in (net[0], net):
    fully_shard(one, mesh=mesh)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
x, y = torch.randn(16, 3), torch.randint(0, 2, (16,))
with Doctor() as doctor:
    for _ in range(6):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
print(repr(doctor.failure), doctor.run.steps, [f.code for f in doctor.findings if f.severity != "info"])
dist.destroy_process_group()
"""


@runs_on_cpu
def test_parameters_whose_memory_fsdp_has_freed_are_not_read(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SHARDED, encoding="utf-8")
    done = forked_python.run([sys.executable, str(script), str(tmp_path / "meet")], tmp_path)
    assert (done.returncode, done.stdout) == (0, "'' 6 []\n"), done.stderr

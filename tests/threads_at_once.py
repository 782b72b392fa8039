"""Four threads train at once under a doctor, again and again: a program of its own, since it may crash."""

import sys
import threading

import torch

from anybatch.doctor.recorder import Doctor


def train(number: int, together: threading.Barrier) -> None:
    """Trains a small model, beginning when all threads are there: a busy machine starts one after the other."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    together.wait()
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.full((2, 3), float(number))).square().mean().backward()
        optimizer.step()


def main() -> None:
    """Prints how many runs were ended since several threads train."""
    ended = 0
    for _ in range(20):
        with Doctor() as doctor:
            together = threading.Barrier(4)
            threads = [threading.Thread(target=train, args=(number, together)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert doctor.failure == "", doctor.failure
        numbers = [fact.at for fact in doctor.run.facts]
        assert numbers == list(range(len(numbers))), numbers
        ended += any(type(fact).__name__ == "ThreadsAtOnce" for fact in doctor.run.facts)
    sys.stdout.write(f"ended early {ended}\n")


if __name__ == "__main__":  # pytest imports it too, to look for examples
    main()

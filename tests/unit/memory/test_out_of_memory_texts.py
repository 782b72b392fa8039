"""What other libraries take for memory that ran out is known too."""

import contextlib
import importlib
import inspect
import re

import pytest

import anybatch
from anybatch.update.transaction import is_out_of_memory

HOSTS = {"accelerate.utils.memory": "should_reduce_batch_size", "lightning.pytorch.utilities.memory": ""}


def texts_of_hosts() -> list[str]:
    """What Accelerate and Lightning look for, as far as they are here, and what else says so."""
    windows = "DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."
    found = [
        windows,
        "std::bad_alloc",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    ]
    for module, name in HOSTS.items():
        with contextlib.suppress(ImportError):
            source = inspect.getsource(importlib.import_module(module))
            body = source.partition(f"def {name}(")[2].partition("\ndef ")[0] if name else source
            found += re.findall(r'"([^"\n]*(?:of memory|t allocate memory|NOT_SUPPORTED|Allocation)[^"\n]*)"', body)
    return sorted(set(found))


@pytest.mark.parametrize("text", texts_of_hosts())
def test_memory_that_ran_out_is_known_by_the_texts_that_others_know(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))


def test_errors_of_ours_and_of_others_are_no_shortage_of_memory() -> None:
    class Foreign(RuntimeError):
        pass

    assert not is_out_of_memory(Foreign("the queue ran out of memory"))
    assert not is_out_of_memory(anybatch.DoesNotFit("one sample alone runs out of memory"))
    assert not is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_BAD_PARAM"))

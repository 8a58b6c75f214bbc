"""Fixtures of the optimizer's tests."""

import pytest
import torch


@pytest.fixture
def one_thread():
    """Tiny tensors on one thread: torch's fused kernels wait for their pool on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

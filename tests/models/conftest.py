import pytest


@pytest.fixture
def one_thread():
    """PyTorch on one thread, for networks so small that several would only wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

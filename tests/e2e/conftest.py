import gc
import warnings

import pytest
import torch

from tests.e2e.oracle import Oracle


@pytest.fixture(scope="session")
def oracle():
    """`transformers` on one thread: the clusters need the others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what transformers says of itself while it loads
        made = Oracle()
    yield made
    torch.set_num_threads(threads)
    gc.collect()

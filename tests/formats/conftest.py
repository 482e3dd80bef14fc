"""The device on which a format test runs: the CPU always, a GPU where there is one."""

import pytest
import torch

GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]
)


@pytest.fixture(params=["cpu", GPU])
def device(request):
    return request.param

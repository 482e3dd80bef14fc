"""AdamW's compiled kernel, executed instruction by instruction: what a thread does with the elements it really has."""

import pytest
import torch

from adamw_forms import BF16, FP8, Case, make
from deepwell.formats.metrics import assert_bitwise_equal
from deepwell.kernels.device.triton_support import triton
from deepwell.train.adamw import scalars, update
from ptx_machine import Executed


class Update(Executed):
    """The update with its PTX; contraction is off for the whole test."""

    def launch(self, grid, *tables, ASM, enable_fp_fusion, **how):
        assert not enable_fp_fusion
        super().launch(grid, *tables, ASM=True, **how)


class Scalars:
    """Takes the place of the kernel that works out a step's scalars: its reference."""

    def __getitem__(self, grid):
        return self.launch

    def launch(self, partials, num_partials, active, num_active, slot_group, steps, groups, hyper, *_, **how):
        for i in active.tolist():
            steps[i] += 1
            hyper[i] = torch.tensor(scalars.hyper_ref(int(steps[i]), groups[slot_group[i]].tolist(), 1.0))


@pytest.mark.parametrize("moment", [BF16, FP8], ids=str)
@pytest.mark.parametrize("shapes", [[(257,), (77,)], [(24, 128)]], ids=["one by one", "in words"])
def test_an_update_is_the_references_however_elements_are_loaded(moment, shapes, monkeypatch):
    # 257 elements end inside a word, so that all are loaded one by one: a thread has elements 32 apart.
    monkeypatch.setattr(triton.knobs.language, "default_fp_fusion", False)
    monkeypatch.setattr(update, "_adamw_kernel", Update(update._adamw_kernel))
    monkeypatch.setattr(scalars, "_prepare_kernel", Scalars())
    kernel, reference, grads, groups = make(Case(moment=moment), shapes, "cpu")
    for step in range(2):
        for form in (kernel, reference):
            form.step(grads[step], groups)
        for mine, wanted in zip(kernel.slots, reference.slots, strict=True):
            for name in ("exp_avg", "exp_avg_sq", "exp_avg_scales", "exp_avg_sq_scales"):
                if getattr(wanted, name) is not None:
                    assert_bitwise_equal(getattr(mine, name), getattr(wanted, name), name)
            # Of 500 parameters one, whose update was rounded once less.
            assert int((mine.param != wanted.param).sum()) <= 1 + mine.param.numel() // 500
            wanted.param.copy_(mine.param)

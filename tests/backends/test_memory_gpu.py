"""How much memory a call takes at its peak, forward and backward, at 32k tokens."""

from __future__ import annotations

import pytest
import torch

import nsa_sel
from nsa_sel.bench.core.cases import make_inputs, make_selection, performance_cases
from nsa_sel.core.call import device_info
from nsa_sel.settings.config import settings_for
from tests.helpers.gpus import needs

pytestmark = pytest.mark.gpu

NAMES = [pytest.param(name, marks=needs(name)) for name in ("triton-group", "triton-tile", "triton-block", "cuda-block", "cupy-cuda")]


@pytest.mark.parametrize("backend", NAMES)
def test_a_training_step_takes_what_it_must(backend: str) -> None:
    """Within 5% of inputs, outputs and the bound on workspace together; the selection's measured facts are not at hand."""
    case = next(case for case in performance_cases() if case.case == "random-32k-h16")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    selection = make_selection(case, "cuda")
    q, k, v, do = make_inputs(case, "cuda")
    inputs = torch.cuda.memory_allocated() - before
    for x in (q, k, v):
        x.requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    o, lse = nsa_sel.selection_attention(q, k, v, selection, return_lse=True, backend=backend)
    gradients = torch.autograd.grad(o, (q, k, v), do)
    peak = torch.cuda.max_memory_allocated() - before
    outputs = sum(x.numel() * x.element_size() for x in (o, lse, *gradients))
    bound = settings_for(device_info(q.device)).workspace_bytes
    assert nsa_sel.decisions()[-1].backward == backend
    assert peak <= 1.05 * (inputs + outputs + bound), f"{peak} bytes for {inputs} of inputs, {outputs} of outputs, {bound} of workspace"

"""Check calls, layer and model of flash-linear-attention on nsa-sel against the plain functions of its wheel (the window is ours)."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel import decisions
from nsa_sel.compat import parallel_moba, parallel_nsa, patch_fla, patch_model
from nsa_sel.compression import BlockMean
from nsa_sel.errors import ArgumentError
from tests.compat.patched import check_shorter_prompt

B, S, G, h, D, BLOCK, N, WINDOW = 2, 150, 2, 3, 16, 16, 4, 24  # the last block is not whole
SCALE = D**-0.5
ROUNDING = 2e-6  # fla computes in float32


pytestmark = pytest.mark.usefixtures("packed_sdpa")


@functools.cache
def naive() -> Any:
    """fla's plain functions, imported where a test begins: collecting the tests of other files need not wait for it."""
    return pytest.importorskip("fla.ops.nsa.naive", reason="pip install flash-linear-attention")


def inputs() -> list[Tensor]:
    """q [B,S,G*h,D], k and v [B,S,G,D], and three gates [B,S,G*h], as fla keeps them."""
    torch.manual_seed(0)
    gates = [torch.rand(B, S, G * h) for _ in range(3)]
    return [x.requires_grad_() for x in (torch.randn(B, S, G * h, D), torch.randn(B, S, G, D), torch.randn(B, S, G, D), *gates)]


def compressed(x: Tensor) -> Tensor:
    """[B,S/BLOCK,G,D] in fla's layout."""
    return BlockMean(BLOCK, BLOCK)(x).transpose(1, 2)


def near(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attention to the last `window` keys, dense and masked."""
    heads = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(heads, 2) for x in (k, v))
    behind = torch.arange(q.shape[1], device=q.device)[:, None] - torch.arange(k.shape[1], device=q.device)
    logits = torch.einsum("bthd,bchd->bhtc", q, k) * q.shape[-1] ** -0.5
    p = logits.masked_fill((behind < 0) | (behind >= window), -torch.inf).softmax(-1)
    return torch.einsum("bhtc,bchd->bthd", p, v)


def reference(
    q: Tensor, k: Tensor, v: Tensor, g_cmp: Tensor, g_slc: Tensor, g_swa: Tensor | None, *, block_counts: int = N, block_size: int = BLOCK,
    window_size: int = 0, **rest: Any,
) -> Tensor:  # fmt: skip
    """`parallel_nsa` from fla's plain functions. Of its keys of a block that is not whole, no row sees the mean: it is padding here."""
    assert all(value is None for value in rest.values())
    scale = q.shape[-1] ** -0.5
    means = [BlockMean(block_size, block_size)(x).transpose(1, 2) for x in (k, v)]
    k_cmp, v_cmp = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -(-k.shape[1] // block_size) - x.shape[1])) for x in means)
    o = naive().naive_nsa_compression(q, k_cmp, v_cmp, block_size, scale)[0] * g_cmp.unsqueeze(-1)
    blocks = naive().naive_nsa_topk(q, k_cmp, block_counts, block_size, scale)
    o = o + naive().naive_nsa_selection(q, k, v, blocks, block_size, scale) * g_slc.unsqueeze(-1)
    return o if g_swa is None or not window_size else o + near(q, k, v, window_size) * g_swa.unsqueeze(-1)


def assert_same(got: Tensor, wanted: Tensor, given: list[Tensor]) -> None:
    assert torch.allclose(got, wanted, rtol=0, atol=ROUNDING)
    do = torch.randn(got.shape, generator=torch.Generator().manual_seed(2))
    for mine, other in zip(torch.autograd.grad(got, given, do), torch.autograd.grad(wanted, given, do, retain_graph=True), strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=ROUNDING * float(other.detach().abs().max().clamp(min=1)) * 4)


@pytest.mark.parametrize("window", [WINDOW, 0])
def test_all_branches_of_parallel_nsa(window: int) -> None:
    given = inputs()
    options: dict[str, Any] = {"block_counts": N, "block_size": BLOCK, "window_size": window}
    used = given if window else given[:5]
    assert_same(parallel_nsa(*given, **options), reference(*given, **options), used)
    assert [str(decision.forward) for decision in list(decisions())[-2:]] == ["choose-torch", "sdpa-packed"]


@pytest.mark.parametrize("window", [WINDOW, 0])
def test_packed_sequences_have_branches_of_their_own(window: int) -> None:
    given = [x.detach()[:1] for x in inputs()[: 6 if window else 5]]
    cu = [0, 37, 37, 38, 140]
    for x in given:
        x[:, 140:] = torch.nan  # padding
        x.requires_grad_()
    options: dict[str, Any] = {"block_counts": N, "block_size": BLOCK, "window_size": window}
    gates = () if window else (None,)
    wanted = torch.cat([reference(*(x[:, a:b] for x in given), *gates, **options) for a, b in itertools.pairwise(cu) if a < b], 1)
    wanted = torch.nn.functional.pad(wanted, (0, 0, 0, 0, 0, S - 140))
    for bounds in (torch.tensor(cu), cu):
        assert_same(parallel_nsa(*given, *gates, **options, cu_seqlens=bounds), wanted, given)
    both = torch.tensor(cu)
    assert_same(parallel_nsa(*given, *gates, **options, cu_seqlens=(both, both)), wanted, given)


@pytest.mark.parametrize("window", [WINDOW, 0])
def test_the_last_queries_over_all_keys(window: int) -> None:
    """As with a cache, there are fewer queries than keys, in one sequence and in packed ones of two lengths."""
    given = inputs()
    options: dict[str, Any] = {"block_counts": N, "block_size": BLOCK, "window_size": window}
    whole = reference(*given, **options)
    keys = given[1:3]
    q, *gates = (x[:, -3:] for x in (given[0], *given[3:]))
    assert torch.allclose(parallel_nsa(q, *keys, *gates, **options), whole[:, -3:], rtol=0, atol=ROUNDING)
    lengths = [S, 41]
    q, *gates = (torch.cat([x[None, i, n - 1 : n] for i, n in enumerate(lengths)], 1) for x in (given[0], *given[3:]))
    k, v = (torch.cat([x[None, i, :n] for i, n in enumerate(lengths)], 1) for x in keys)
    cu_q, cu_k = torch.tensor([0, 1, 2]), torch.tensor([0, S, S + 41])
    wanted = torch.cat([whole[None, i, n - 1] for i, n in enumerate(lengths)])[None]
    assert torch.allclose(parallel_nsa(q, k, v, *gates, **options, cu_seqlens=(cu_q, cu_k)), wanted, rtol=0, atol=ROUNDING)


def test_blocks_of_the_user_replace_those_that_are_chosen() -> None:
    given = inputs()
    blocks = naive().naive_nsa_topk(given[0], compressed(given[1]), N, BLOCK, SCALE)
    own = (torch.arange(S) // BLOCK).view(1, S, 1, 1).expand(B, S, G, 1)
    options: dict[str, Any] = {"block_size": BLOCK, "window_size": WINDOW}
    selected = parallel_nsa(*given[:3], None, given[4], None, block_indices=own, block_size=BLOCK)
    rest = parallel_nsa(*given[:4], torch.zeros(B, S, G * h), given[5], block_counts=N, **options)
    o = parallel_nsa(*given, block_indices=own, **options)
    assert torch.allclose(o, selected + rest, rtol=0, atol=2 * ROUNDING)
    assert not torch.allclose(o, parallel_nsa(*given, block_indices=blocks, **options), rtol=0, atol=0.01)


# fla's layer and model


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """fla.layers.nsa. Its rotary and norm kernels run in Triton's interpreter, which cannot choose among configs: the first is taken."""
    pytest.importorskip("transformers")
    module = pytest.importorskip("fla.layers.nsa", reason="pip install flash-linear-attention")
    from triton.runtime.autotuner import Autotuner

    monkeypatch.setattr(Autotuner, "prune_configs", lambda self, kwargs: self.configs[:1])
    return module


@pytest.fixture
def layers(interpreted: Any) -> Iterator[Any]:
    """fla.layers.nsa, patched."""
    undo = patch_fla()
    yield interpreted
    undo()


def with_reference(monkeypatch: pytest.MonkeyPatch, layers: Any, work: Callable[[], Any]) -> Any:
    """Return `work()` with fla's plain functions in place of the patch."""
    with monkeypatch.context() as patch:
        patch.setattr(layers, "parallel_nsa", reference)
        return work()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 1, 0, 2)])
def test_patches_undone_in_any_order_put_back_flas_own(order: tuple[int, ...]) -> None:
    modules = [pytest.importorskip(name) for name in ("fla.ops.nsa", "fla.ops.nsa.parallel", "fla.layers.nsa")]
    mobas = [pytest.importorskip(name) for name in ("fla.ops.moba", "fla.ops.moba.parallel", "fla.layers.moba")]
    models = [pytest.importorskip("fla.models.nsa").NSAModel, pytest.importorskip("fla.models.moba").MoBAModel]

    def held() -> list[Any]:
        dense = [mobas[-1].flash_attn_func, mobas[-1].flash_attn_varlen_func]
        return [m.parallel_nsa for m in modules] + [m.parallel_moba for m in mobas] + [m.forward for m in models] + dense

    own = held()
    undo = [patch_fla() for _ in range(3)]
    for i in order:
        assert held()[:6] == [parallel_nsa] * 3 + [parallel_moba] * 3
        undo[i]()
    assert held() == own


def test_undo_leaves_what_another_library_put_over_the_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    module, another = pytest.importorskip("fla.layers.nsa"), lambda *_: None
    monkeypatch.setattr(module, "parallel_nsa", module.parallel_nsa)  # fla's own is back after the test
    undo = patch_fla()
    module.parallel_nsa = another
    undo()
    assert module.parallel_nsa is another


def test_patches_are_refused_where_flas_own_kernels_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = pytest.importorskip("fla.layers.nsa").NativeSparseAttention(32, num_heads=4, num_kv_heads=2, head_dim=16, layer_idx=0)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for patch in (patch_fla, lambda: patch_model(layer)):
        with pytest.raises(ArgumentError, match="on a CPU call nsa_sel"):
            patch()


def test_flas_layer_runs_on_nsa_sel(layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = layers.NativeSparseAttention(
        32, num_heads=4, num_kv_heads=2, head_dim=16, block_size=8, block_counts=3, window_size=12, layer_idx=0
    )
    x = torch.randn(2, 37, 32, requires_grad=True)
    weights = [x, *layer.parameters()]
    got = layer(x)[0]
    ran = list(decisions())[-2:]
    assert [(decision.request.kind, decision.request.n) for decision in ran] == [("choose", 3), ("attend", 3)]
    assert_same(got, with_reference(monkeypatch, layers, lambda: layer(x)[0]), weights)


def test_patch_model_changes_one_instance_of_flas_layer(interpreted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    theirs = interpreted.NativeSparseAttention(
        32, num_heads=4, num_kv_heads=2, head_dim=16, block_size=8, block_counts=3, window_size=12, layer_idx=0
    )
    layer, own = copy.deepcopy(theirs), interpreted.parallel_nsa
    patched = patch_model(layer)
    assert interpreted.parallel_nsa is own is not parallel_nsa
    assert str(patched) == "(the module itself): NSA: 3 of the blocks of 8 keys, their means, and a window of 12 keys"
    x = torch.randn(2, 37, 32, requires_grad=True)
    wanted = with_reference(monkeypatch, interpreted, lambda: theirs(x)[0])
    for mine in (layer, copy.deepcopy(layer)):
        assert mine.forward.__self__ is mine
        assert_same(mine(x)[0], wanted, [x])
    patched.undo()
    assert "forward" not in layer.__dict__
    monkeypatch.setattr(interpreted.NativeSparseAttention, "forward", lambda self, hidden_states: hidden_states)
    with pytest.raises(ArgumentError, match="model is NativeSparseAttention, whose forward does not call parallel_nsa; allowed"):
        patch_model(layer)


def flas_model() -> Any:
    from fla.models.nsa import NSAConfig, NSAForCausalLM

    torch.manual_seed(0)
    config = NSAConfig(
        hidden_size=32, num_hidden_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, block_size=8, block_counts=3, window_size=12,
        vocab_size=50, intermediate_size=32, fuse_cross_entropy=False, fuse_norm=False, fuse_swiglu=False, fuse_linear_cross_entropy=False,
    )  # fmt: skip
    return NSAForCausalLM(config)


def test_flas_model_trains_and_generates_on_nsa_sel(layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = flas_model()
    tokens = torch.randint(50, (2, 30))
    weights = [x for x in model.parameters() if x.requires_grad]
    assert_same(model(tokens).logits, with_reference(monkeypatch, layers, lambda: model(tokens).logits), weights)

    check_shorter_prompt(model, tokens, 5, 4)


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_flas_model_takes_its_cache_by_either_name(layers: Any, name: str) -> None:
    """transformers 5.24 hands it over as cache=, older ones as past_key_values=."""
    model, tokens = flas_model(), torch.randint(50, (2, 30))
    with torch.no_grad():
        whole, first = model(tokens).logits, model(tokens[:, :25], use_cache=True)
        rest = model(tokens[:, 25:], use_cache=True, **{name: first.past_key_values})
    assert torch.allclose(rest.logits, whole[:, 25:], rtol=0, atol=1e-5)
    assert rest.past_key_values is first.past_key_values
    with pytest.raises(ArgumentError, match="with past_key_values"):
        model(tokens, past_key_values=first.past_key_values, cache=first.past_key_values)


# fla's MoBA


def plain_flash(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int = 0, max_seqlen_k: int = 0,
    causal: bool = True, softmax_scale: float | None = None, **_: Any,
) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
    """flash-attn's forward pass of packed sequences, dense and masked: o [T,H,D] and lse [H,T]. Rows are the last keys."""
    dtype, (k, v) = q.dtype, (x.repeat_interleave(q.shape[1] // k.shape[1], 1).float() for x in (k, v))
    q = q.float()
    outputs, logs = [], []
    for (a, b), (c, d) in zip(itertools.pairwise(cu_seqlens_q.tolist()), itertools.pairwise(cu_seqlens_k.tolist()), strict=True):
        logits = torch.einsum("thd,chd->htc", q[a:b], k[c:d]) * q.shape[-1] ** -0.5
        if causal:
            logits = logits.masked_fill(torch.ones_like(logits[0], dtype=torch.bool).triu(d - c - (b - a) + 1), -torch.inf)
        outputs.append(torch.einsum("htc,chd->thd", logits.softmax(-1), v[c:d]))
        logs.append(logits.logsumexp(-1))
    return torch.cat(outputs).to(dtype), torch.cat(logs, 1), None, None


def plain_flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, softmax_scale: float, causal: bool, **_: Any,
) -> None:  # fmt: skip
    """flash-attn's backward pass, which takes o and lse of more keys than these."""
    dout, q, k, v, out = (x.float() for x in (dout, q, k, v, out))
    for (a, b), (c, d) in zip(itertools.pairwise(cu_seqlens_q.tolist()), itertools.pairwise(cu_seqlens_k.tolist()), strict=True):
        logits = torch.einsum("thd,chd->htc", q[a:b], k[c:d]) * softmax_scale
        if causal:
            logits = logits.masked_fill(torch.ones_like(logits[0], dtype=torch.bool).triu(1), -torch.inf)
        p = (logits - softmax_lse[:, a:b, None]).exp()
        dp = torch.einsum("thd,chd->htc", dout[a:b], v[c:d]) - (dout[a:b] * out[a:b]).sum(-1).T.unsqueeze(-1)
        dq[a:b] = torch.einsum("htc,chd->thd", p * dp, k[c:d]) * softmax_scale
        dk[c:d] = torch.einsum("htc,thd->chd", p * dp, q[a:b]) * softmax_scale
        dv[c:d] = torch.einsum("htc,thd->chd", p, dout[a:b])


def plain_dense(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    cu_q, cu_k = (torch.arange(len(x) + 1, device=x.device) * x.shape[1] for x in (q, k))
    return plain_flash(*(x.flatten(0, 1) for x in (q, k, v)), cu_q, cu_k)[0].view(q.shape)


@pytest.fixture
def own_moba(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """fla's own `parallel_moba`, its choice, its merge of two passes and its backward pass, over a plain flash-attn."""
    module = pytest.importorskip("fla.ops.moba.parallel", reason="pip install flash-linear-attention")
    monkeypatch.setattr(module, "flash_attn_varlen_func", lambda *args, **options: plain_flash(*args, **options)[0])
    monkeypatch.setattr(module, "_flash_attn_varlen_forward", plain_flash)
    monkeypatch.setattr(module, "_flash_attn_varlen_backward", plain_flash_backward)
    assert module.parallel_moba is not parallel_moba, "no patch may be active yet"
    return module.parallel_moba  # type: ignore[no-any-return]


@pytest.mark.parametrize("topk", [0, 1, 2, 4, 50])
@pytest.mark.parametrize("cu", [[0, 150], [0, 75, 150], [0, 37, 38, 54, 150], [0, 48, 96], [0, 16, 150]], ids=str)
def test_parallel_moba_is_flas_own(own_moba: Callable[..., Tensor], cu: list[int], topk: int) -> None:
    torch.manual_seed(0)
    given = [torch.randn(1, cu[-1], 6, D, requires_grad=True) for _ in range(3)]
    wanted = own_moba(*given, torch.tensor(cu), cu[-1], BLOCK, topk)
    assert_same(parallel_moba(*given, torch.tensor(cu), cu[-1], BLOCK, topk), wanted, given)


@pytest.mark.parametrize("cu", [[0, 70, 70, 71, 140], [0, 140], [0, 0]], ids=str)
@pytest.mark.parametrize("topk", [1, 3])
def test_parallel_moba_with_fewer_kv_heads_and_padding(own_moba: Callable[..., Tensor], cu: list[int], topk: int) -> None:
    """The original has neither: it stands here on repeated heads and on sequences that are not empty."""
    q, k, v = (x.detach()[:1] for x in inputs()[:3])
    for x in (q, k, v):
        x[:, cu[-1] :] = torch.nan
        x.requires_grad_()
    bounds = torch.tensor(cu).unique()
    k_all, v_all = (x[:, : cu[-1]].repeat_interleave(h, 2) for x in (k, v))
    wanted = own_moba(q[:, : cu[-1]], k_all, v_all, bounds, S, BLOCK, topk) if cu[-1] else torch.zeros_like(q[:, :0])
    wanted = torch.nn.functional.pad(wanted, (0, 0, 0, 0, 0, S - cu[-1]))
    got = parallel_moba(q, k, v, torch.tensor(cu), S, BLOCK, topk)
    assert_same(got, wanted, [q, k, v]) if cu[-1] else None
    assert torch.allclose(got, wanted, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("name", ["q", "chunk_size", "topk", "cu_seqlens"])
def test_parallel_moba_refuses_by_name(name: str) -> None:
    q, k, v = (x if name == "q" else x[:1] for x in inputs()[:3])
    with pytest.raises(ArgumentError, match=name):
        parallel_moba(q, k, v, [0, S + (name == "cu_seqlens")], S, 0 if name == "chunk_size" else 16, 2.5 if name == "topk" else 3)  # type: ignore[arg-type]


@pytest.fixture
def own(own_moba: Callable[..., Tensor], layers: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function that returns what `work` returns with fla's own functions over a plain flash-attn in place of the patch."""
    module = pytest.importorskip("fla.layers.moba")

    def run(work: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(module, "parallel_moba", own_moba)
            patch.setattr(module, "flash_attn_func", plain_dense)
            patch.setattr(module, "flash_attn_varlen_func", lambda *args, **options: plain_flash(*args, **options)[0])
            return work()

    return run


def test_an_installed_flash_attn_keeps_decoding_flas_moba(monkeypatch: pytest.MonkeyPatch) -> None:
    module, theirs = pytest.importorskip("fla.layers.moba"), lambda *_: None
    monkeypatch.setattr(module, "flash_attn_func", theirs)
    undo = patch_fla()
    try:
        assert module.flash_attn_func is theirs
    finally:
        undo()


@pytest.mark.parametrize("options", [{}, {"attention_mask": None}, {"cu_seqlens": None}], ids=["whole", "padded", "packed"])
def test_flas_moba_layer_runs_on_nsa_sel(own: Callable[..., Any], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = pytest.importorskip("fla.layers.moba").MoBA(32, num_heads=2, moba_chunk_size=8, moba_topk=3, layer_idx=0)
    x = torch.randn(1 if "cu_seqlens" in options else 2, 45, 32, requires_grad=True)
    mask = torch.ones(2, 45, dtype=torch.long)
    mask[1, :6] = 0
    options = {name: mask if name == "attention_mask" else torch.tensor([0, 7, 45]) for name in options}
    got = layer(x, **options)[0]
    assert {(decision.request.kind, decision.request.n) for decision in list(decisions())[-2:]} == {("choose", 3), ("attend", 3)}
    assert_same(got, own(lambda: layer(x, **options)[0]), [x, *layer.parameters()])


def flas_moba_model(**options: Any) -> Any:
    from fla.models.moba import MoBAConfig, MoBAForCausalLM

    torch.manual_seed(0)
    config = MoBAConfig(
        hidden_size=32, num_hidden_layers=2, moba_chunk_size=8, vocab_size=50, intermediate_size=32, fuse_cross_entropy=False,
        fuse_norm=False, fuse_swiglu=False, **options,
    )  # fmt: skip
    return MoBAForCausalLM(config)


def test_flas_moba_model_trains_and_generates_on_nsa_sel(own: Callable[..., Any]) -> None:
    model, tokens = flas_moba_model(num_heads=2, moba_topk=2), torch.randint(50, (2, 30))
    weights = [x for x in model.parameters() if x.requires_grad]
    assert_same(model(tokens).logits, own(lambda: model(tokens).logits), weights)

    mask = torch.ones_like(tokens)
    mask[1, :5] = 0  # a shorter prompt, padded on the left
    for use_cache in (True, False):
        options: dict[str, Any] = {
            "attention_mask": mask,
            "max_new_tokens": 4,
            "do_sample": False,
            "pad_token_id": 0,
            "use_cache": use_cache,
        }
        with torch.no_grad():
            assert torch.equal(model.generate(tokens, **options), own(lambda options=options: model.generate(tokens, **options)))


def test_patch_model_changes_one_model_of_flas_moba(
    own_moba: Callable[..., Any], interpreted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    module = pytest.importorskip("fla.layers.moba")
    theirs, tokens = flas_moba_model(num_heads=2, moba_topk=2), torch.randint(50, (2, 30))
    model = copy.deepcopy(theirs)
    patched = patch_model(model)
    assert list(patched.changed) == ["model", "model.layers.0.attn", "model.layers.1.attn"]
    assert "attn: MoBA: 2 of the blocks of 8 keys" in str(patched)
    assert module.parallel_moba is own_moba
    with torch.no_grad():
        first = model(tokens[:, :25], use_cache=True)
        got = [model(tokens).logits, model(tokens[:, 25:], use_cache=True, cache=first.past_key_values).logits]
        monkeypatch.setattr(module, "flash_attn_func", plain_dense)
        first = theirs(tokens[:, :25], use_cache=True)
        wanted = [theirs(tokens).logits, theirs(tokens[:, 25:], use_cache=True, past_key_values=first.past_key_values).logits]
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)
    patched.undo()
    assert not any("forward" in x.__dict__ for x in model.modules())
    for layer in model.model.layers:
        layer.attn.use_flash_moba = True
    left = patch_model(model).left
    assert left == {f"model.layers.{i}.attn": "MoBA by FlashMoBA: use_flash_moba is set" for i in range(2)}


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
@pytest.mark.parametrize("padding", [0, 5])
def test_flas_moba_attends_densely_over_a_cache(own: Callable[..., Any], name: str, padding: int) -> None:
    model, tokens = flas_moba_model(num_heads=4, num_kv_heads=2, moba_topk=1), torch.randint(50, (2, 30))
    mask = torch.ones_like(tokens)
    mask[1, :padding] = 0
    new = 1 if padding else 4  # fla takes one token at a time beside a mask

    def last_logits() -> Tensor:
        masks = [mask[:, : 30 - new], mask] if padding else [None, None]
        with torch.no_grad():
            first = model(tokens[:, : 30 - new], attention_mask=masks[0], use_cache=True)
            return model(tokens[:, 30 - new :], attention_mask=masks[1], use_cache=True, **{name: first.past_key_values}).logits

    got = last_logits()
    assert torch.allclose(got, own(last_logits), rtol=0, atol=1e-5)
    with torch.no_grad():  # topk = 1 is dense attention: a cache changes nothing
        assert torch.allclose(
            got, model(tokens, attention_mask=mask if padding else None, use_cache=False).logits[:, -new:], rtol=0, atol=1e-5
        )


def float_results(layer: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """o and the gradients of x and all weights, in float32."""
    weights = [x, *(weight for weight in layer.parameters() if weight.requires_grad)]
    o = layer(x)[0]
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
    return [found.float() for found in (o, *torch.autograd.grad(o, weights, do))]


@pytest.mark.gpu
def test_flas_layer_in_bfloat16_is_near_its_plain_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NSA_SEL_BACKEND")
    module = pytest.importorskip("fla.layers.nsa", reason="pip install flash-linear-attention")
    torch.manual_seed(0)
    sizes = {"num_heads": 32, "num_kv_heads": 2, "head_dim": 64, "block_size": 64, "block_counts": 4, "window_size": 100, "layer_idx": 0}
    exact = module.NativeSparseAttention(256, **sizes).cuda()
    layer = copy.deepcopy(exact).bfloat16()
    x = torch.randn(1, 700, 256, device="cuda").bfloat16()
    monkeypatch.setattr(module, "parallel_nsa", reference)
    wanted = float_results(exact, x.float().requires_grad_())
    undo = patch_fla()
    try:
        mine = float_results(layer, x.clone().requires_grad_())
        ran = [str(decision.forward) for decision in list(decisions())[-2:]]
    finally:
        undo()
    assert ran[0] in ("choose-cuda", "choose-triton")
    assert ran[1] not in ("sdpa-packed", "numba")
    # Where two blocks' scores are level up to rounding, rows may choose the other one: few do, and they differ in one block of four.
    rows = (mine[0] - wanted[0]).flatten(0, -2).norm(dim=-1) / wanted[0].flatten(0, -2).norm(dim=-1)
    assert float(rows.quantile(0.9)) < 0.02
    for got, exactly in zip(mine[1:], wanted[1:], strict=True):
        assert (got - exactly).norm() < 0.05 * exactly.norm()


@pytest.mark.gpu
def test_flas_moba_layer_in_bfloat16_is_near_flas_own(own: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NSA_SEL_BACKEND")
    module = pytest.importorskip("fla.layers.moba")
    torch.manual_seed(0)
    layer = module.MoBA(256, num_heads=4, num_kv_heads=4, moba_chunk_size=64, moba_topk=3, layer_idx=0).to("cuda", torch.bfloat16)
    x = torch.randn(2, 700, 256, device="cuda").bfloat16()
    mine = float_results(layer, x.clone().requires_grad_())
    ran = [str(decision.forward) for decision in list(decisions())[-2:]]
    assert ran[0] in ("choose-cuda", "choose-triton")
    assert ran[1] not in ("sdpa-packed", "numba")
    for got, wanted in zip(mine, own(lambda: float_results(layer, x.clone().requires_grad_())), strict=True):
        assert (got - wanted).norm() < 0.02 * wanted.norm()
    q, k, v = (torch.randn(3, n, heads, 64, device="cuda").bfloat16() for n, heads in ((1, 4), (900, 2), (900, 2)))
    cu_q, cu_k = torch.arange(4, device="cuda", dtype=torch.int32), torch.tensor([0, 5, 700, 1600], device="cuda", dtype=torch.int32)
    for name, given in (
        ("flash_attn_func", (q, k, v)),
        ("flash_attn_varlen_func", (q.squeeze(1), *(x.flatten(0, 1)[:1600] for x in (k, v)))),
    ):
        packed = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 1, "max_seqlen_k": 900} if "varlen" in name else {}
        wanted = plain_flash(*given, cu_q, cu_k)[0] if packed else plain_dense(*given, causal=True)
        assert torch.allclose(getattr(module, name)(*given, **packed, causal=True).float(), wanted.float(), rtol=0.02, atol=0.01)

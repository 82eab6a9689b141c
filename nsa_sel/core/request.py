"""The request: what a policy sees of a call. Imports no torch, so that decisions can be replayed anywhere."""

from __future__ import annotations

from typing import Literal

import msgspec

# Attention to selected blocks; to compressed keys, with the blocks that they choose; the loss of an indexer.
Kind = Literal["attend", "choose", "index_loss"]
Quantized = Literal["e4m3", "e4m3/tensor", "e4m3/head", "e4m3/page"]  # format of K and V, and what has a scale of its own
FEW_TOKENS = 8  # new tokens of a sequence up to which a call is a decoding step
SHARING_TOKENS = (1, 2, 4, 8, 16, 32, 64)  # tile sizes, in adjacent query tokens, that `sharing` covers


class DeviceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of one device that a policy sees. Pass one of another machine to see its decisions."""

    kind: Literal["cpu", "cuda"]
    name: str = "cpu"
    sm: int | None = None  # compute capability, 89 for 8.9
    sm_count: int = 0
    shared_memory: int = 0  # bytes per CTA
    triton_interpret: bool = False  # TRITON_INTERPRET=1: Triton kernels run on CPU tensors, for tests


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The static facts of one call of `selection_attention`, `compressed_attention`, `choose_blocks` or `indexer_loss`.

    Attributes:
        B, S, S_kv, G, h, Dk, Dv: sizes of q [B,S,G,h,Dk], k [B,G,S_kv,Dk], v [B,G,S_kv,Dv].
        n: ranges per row.
        block_size: keys of a block, None for ranges.
        max_length: most keys that a row selects: a static bound, or exact after `Selection.measure()`.
        dtype: of q, for example "bfloat16".
        needs_grad: whether there is a backward pass.
        aligned: whether pointers and strides of q, k, v are multiples of 16 bytes.
        sharing: distinct blocks of 1, 2, 4 ... 64 adjacent tokens (`SHARING_TOKENS`) over those of one token, from
            `Selection.measure()` or, if `counted`, from the first call of its kind; None: `runtime.sharing_prior` is
            used.
        page_size: keys of a page in a paged cache, else None. S_kv is then the room of a row of the block table.
        quantized: format of the numbers of a KV cache that are not of `dtype`, and what has a scale of its own: the
            tensor, each head, or each head of each page; None for a cache of `dtype`.
        kind: which of the three. For "choose", n blocks of block_size are chosen of S_kv keys, and max_length is S_kv. For
            "index_loss", Dv is the head dimension of the index branch.
        compress: keys of a compressed key, and from one to the next; None for "attend".
        pool: of a choice without attention, where Dv is 0: what is scored, and how it is reduced over heads, and over a
            block (`nsa_sel.core.call.Pool.words`); ("lse",) for the log-sum-exp alone; None for attention.
        mean_length: keys that a row selects on average, to two digits, from `Selection.measure()`; None: not measured.
        counted: whether `sharing` was counted on a sample of rows of the first call of its kind
            (nsa_sel/core/decide.py).
    """

    B: int
    S: int
    S_kv: int
    G: int
    h: int
    Dk: int
    Dv: int
    n: int
    block_size: int | None
    max_length: int
    dtype: str
    needs_grad: bool = False
    aligned: bool = True
    sharing: tuple[float, ...] | None = None
    page_size: int | None = None
    quantized: Quantized | None = None
    kind: Kind = "attend"
    compress: tuple[int, int] | None = None
    pool: tuple[str, ...] | None = None
    counted: bool = False
    mean_length: int | None = None

    @property
    def length(self) -> int:
        """L of the min-L gate and of the tuner's key: the mean row where it was measured, else the bound of the
        longest."""
        return self.max_length if self.mean_length is None else self.mean_length

    def phase(self, backward: bool) -> str:
        """Return the phase: cost models are fitted to each apart.

        One of "forward", "backward", "decode" (one query per sequence), "tokens" (up to `FEW_TOKENS`), "choose",
        "choose-backward", "index-loss" and "index-loss-backward"; over a quantized cache "decode-e4m3", and so on (`phase_of_format`).
        """
        if self.kind == "index_loss":
            return "index-loss-backward" if backward else "index-loss"
        if self.kind == "choose":
            return "choose-backward" if backward else "choose"
        if backward:
            return "backward"
        return phase_of_format("decode" if self.S == 1 else "tokens" if self.S <= FEW_TOKENS else "forward", self.quantized)

    def request_class(self) -> Request:
        """Return the key of cached decisions: S_kv rounded up to a power of two, so that decode steps share one.

        S_kv of a prefill from the first token stays exact, since S is in the key anyway. Policies see the class, never
        the exact call, so a cached decision equals a new one.
        """
        S_kv = self.S_kv if self.S_kv == self.S else 1 << max(0, self.S_kv - 1).bit_length()
        if S_kv == self.S_kv:
            return self
        # If only S_kv bounds a row, round that bound, too: otherwise every decode step would be its own class.
        return msgspec.structs.replace(self, S_kv=S_kv, max_length=S_kv if self.max_length == self.S_kv else self.max_length)


def phase_of_format(phase: str, quantized: Quantized | None) -> str:
    """Return the name of a phase over caches of this format, None for those of q's dtype: "decode", "decode-e4m3"."""
    return phase if quantized is None else f"{phase}-{quantized.partition('/')[0]}"


def example_request(*, needs_grad: bool = False) -> Request:
    """Return an 8k-token prefill of the NSA paper's shape: 16 blocks of 64 keys per row, 4 groups of 16 heads, bf16."""
    return Request(
        B=1, S=8192, S_kv=8192, G=4, h=16, Dk=128, Dv=128, n=16, block_size=64, max_length=1024, dtype="bfloat16", needs_grad=needs_grad,
    )  # fmt: skip


def example_choice(*, needs_grad: bool = False) -> Request:
    """Return the choice of the blocks of `example_request`, from compressed keys of 32 keys every 16 keys."""
    return msgspec.structs.replace(example_request(needs_grad=needs_grad), max_length=8192, kind="choose", compress=(32, 16))


def example_loss(*, needs_grad: bool = False) -> Request:
    """Return the loss of an indexer over the blocks of `example_request`."""
    return msgspec.structs.replace(example_request(needs_grad=needs_grad), kind="index_loss")

"""The call without its tensors: all that a policy may look at. Imports no torch, so that a decision can be replayed anywhere."""

from __future__ import annotations

from typing import Literal

import msgspec

SHARING_TOKENS = (1, 2, 4, 8, 16, 32, 64)  # sizes of tiles of adjacent query tokens for which `sharing` is known


class DeviceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of one device that a policy may use. Inject one to see what another machine would decide."""

    kind: Literal["cpu", "cuda"]
    name: str = "cpu"
    sm: int | None = None  # compute capability, 89 for 8.9
    sm_count: int = 0
    shared_memory: int = 0  # bytes that one thread block may use
    triton_interpret: bool = False  # TRITON_INTERPRET=1: Triton kernels run on CPU tensors, for tests


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The static facts of one call of `selection_attention`: q [B,S,G,h,Dk], k [B,G,S_kv,Dk], v [B,G,S_kv,Dv], n ranges a row.

    `max_length` is the largest number of keys that one row may select (L of the min-L gate), a static bound unless
    `Selection.measure()` made it exact. `aligned` tells that pointers and strides of q, k, v are multiples of 16 bytes.
    `sharing` tells how many blocks a tile of 1, 2, 4 ... 64 adjacent tokens (`SHARING_TOKENS`) chooses between them, over the blocks
    of one token, as `Selection.measure()` found; None: not measured, the prior `runtime.sharing_prior` stands in.
    `page_size`: keys of a page where the keys are those of a paged cache; S_kv is then what a row of its block table has room for.
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

    def request_class(self) -> Request:
        """The key under which decisions are remembered: S_kv rounded up to a power of two, so that decode steps share one.

        The S_kv of a prefill from the first token on stays: S is in the key anyway. Policies are given the class, never the
        exact call: a remembered decision is the one that would be taken anew.
        """
        S_kv = self.S_kv if self.S_kv == self.S else 1 << max(0, self.S_kv - 1).bit_length()
        if S_kv == self.S_kv:
            return self
        # Where nothing but S_kv bounds a row, the bound grows with it: otherwise every decode step would be a class of its own.
        return msgspec.structs.replace(self, S_kv=S_kv, max_length=S_kv if self.max_length == self.S_kv else self.max_length)


# Requests of the two examples that the documents and `nsa-sel explain` use when nothing is given.
def example_request(*, needs_grad: bool = False) -> Request:
    """An 8k-token prefill of the NSA paper's shape: 16 blocks of 64 keys a row, 4 groups of 16 heads, bf16."""
    return Request(
        B=1,
        S=8192,
        S_kv=8192,
        G=4,
        h=16,
        Dk=128,
        Dv=128,
        n=16,
        block_size=64,
        max_length=1024,
        dtype="bfloat16",
        needs_grad=needs_grad,
    )

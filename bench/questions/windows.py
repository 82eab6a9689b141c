"""What does a sliding window take by our kernels, by PyTorch's FlexAttention, and by dense attention over all keys?

    python -m nsa_sel.bench.questions.windows --out bench/results/h200/profiles/windows.jsonl

bf16, random inputs, windows of 512 keys. Contenders:
    ours     sliding_window_attention: CUDA on Hopper, Triton elsewhere
    flex     FlexAttention under a block mask, compiled for the case; the mask is made and the compiler runs before anything is timed
    dense    causal attention by cuDNN
Directions and fields are those of layer_parts. Results of `flex` are compared with ours, whose own errors tests bound.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

from nsa_sel.bench.core import environment, markdown, store
from nsa_sel.bench.core.baselines import dense_causal_sdpa
from nsa_sel.bench.core.command_line import echo, need_gpu, program
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.questions import layer_parts
from nsa_sel.window import sliding_window_attention

WINDOW = 512
CONTENDERS = ("ours", "flex", "dense")


class Case(NamedTuple):
    B: int
    S: int
    G: int
    h: int
    D: int


CASES = {
    "8k": Case(1, 8192, 4, 16, 128),
    "32k": Case(1, 32768, 4, 16, 128),
    "128k": Case(1, 131072, 4, 16, 128),
    "example-8k": Case(4, 8192, 2, 8, 64),
    "example-64k": Case(1, 65536, 2, 8, 64),
}


def contender(name: str, case: Case) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """o [B,S,G,h,D] of q [B,S,G,h,D], k and v [B,G,S,D]."""
    if name == "flex":
        torch.compiler.reset()  # the compiler refuses a function that it has compiled for too many cases
        mask = window_mask(case.S, case.S, WINDOW, "cuda")
        return lambda q, k, v: flex_window(q, k, v, mask)
    if name == "dense":
        return dense_causal_sdpa
    return lambda q, k, v: sliding_window_attention(q, k, v, WINDOW)


def flex_window(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """o [B,S,G,h,Dv] of q [B,S,G,h,Dk], k [B,G,S_kv,Dk], v [B,G,S_kv,Dv] under a `window_mask`. Compiles at the first call of its kind."""
    h = q.shape[3]
    o = _compiled()(q.flatten(2, 3).transpose(1, 2), k, v, block_mask=mask, enable_gqa=h > 1)
    return torch.unflatten(o.transpose(1, 2), 2, (-1, h))


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False, fullgraph=True)  # type: ignore[return-value]


def window_mask(S: int, S_kv: int, window: int, device: str) -> Any:
    """The BlockMask of rows at the last S positions that see the last `window` keys. Compiled on a GPU: S x S_kv is never in memory."""
    from torch.nn.attention.flex_attention import create_block_mask

    start = S_kv - S

    def near(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key <= row + start) & (key > row + start - window)

    return create_block_mask(near, None, None, S, S_kv, device=device, _compile=device == "cuda")


def inputs_of(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    B, S, G, h, D = case
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (B, S, G, h, D), (B, G, S, D), (B, G, S, D)
    q, k, v = (torch.randn(x, dtype=torch.bfloat16, device="cuda", generator=generator).requires_grad_() for x in shapes)
    return q, k, v


def ahead(rows: list[Row], case: str, over: str = "flex") -> dict[str, float]:
    """How many times as fast as `over` ours is in a case: forward, backward, and both together."""
    times = {(row["contender"], row["direction"]): row["ms_median"] for row in rows if row["case"] == case}
    both = {name: times[name, "fwd"] + times[name, "bwd"] for name in ("ours", over)}
    return {way: times[over, way] / times["ours", way] for way in ("fwd", "bwd")} | {"both": both[over] / both["ours"]}


def table(rows: list[Row]) -> str:
    """Milliseconds forward / backward by case, and how far ahead of FlexAttention ours is; "-" was not measured, the last row counts."""
    found = {(row["case"], row["contender"], row["direction"]): row["ms_median"] for row in rows}

    def cell(case: str, name: str) -> str:
        return " / ".join(f"{found[case, name, way]:.3g}" if (case, name, way) in found else "-" for way in ("fwd", "bwd"))

    def factors(case: str) -> str:
        return " / ".join(f"{x:.2f}x" for x in ahead(rows, case).values()) if (case, "flex", "bwd") in found else "-"

    lines = [(case, *(cell(case, name) for name in CONTENDERS), factors(case)) for case in dict.fromkeys(row["case"] for row in rows)]
    return markdown.table(["case", *CONTENDERS, "ahead of flex, forward / backward / both"], lines, left=1)


def main(
    out: Annotated[Path, typer.Option(help="JSON-lines file that rows are appended to")],
    cases: Annotated[str, typer.Option(help="cases, comma-separated")] = ",".join(CASES),
    contenders: Annotated[str, typer.Option(help="contenders, comma-separated")] = ",".join(CONTENDERS),
    rep: Annotated[float, typer.Option(help="milliseconds that the timed calls of a direction should fill")] = 200,
) -> None:
    """Time every contender in every case; append the rows, and print a table."""
    need_gpu("windows")
    facts, rows = environment.stamp(), list[Row]()
    for name in cases.split(","):
        case = CASES[name]
        inputs = inputs_of(case)
        ours = sliding_window_attention(*inputs, WINDOW)
        for who in contenders.split(","):
            attend = contender(who, case)
            error = float((attend(*inputs) - ours).abs().max()) if who == "flex" else None
            same = {"case": name, **case._asdict(), "window": WINDOW, "contender": who, "difference": error, **facts}
            new = [{**row, **same} for row in layer_parts.measure((functools.partial(attend, *inputs), inputs), rep)]
            store.append(out, new)
            rows += new
            torch.cuda.empty_cache()
    echo(table(rows))


if __name__ == "__main__":
    program(main)

"""The files of `nsa-sel run`: read q, k, v and a selection, write o and lse, as .safetensors."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from nsa_sel.core.decision import Decision
from nsa_sel.errors import ArgumentError, closest, shown
from nsa_sel.selection import Selection

REQUIRED = ("q", "k", "v")
SELECTIONS = ("ranges", "block_indices")
ALLOWED = (*REQUIRED, *SELECTIONS, "q_pos")
_LAYOUT = (
    "q [B,S,G,h,Dk], k [B,G,S_kv,Dk], v [B,G,S_kv,Dv], one of ranges [B,S,G,n,2] and block_indices [B,S,G,n], optionally q_pos [S] or [B,S]"
)


class Problem(NamedTuple):
    """The content of a file: q [B,S,G,h,Dk], k [B,G,S_kv,Dk], v [B,G,S_kv,Dv], the selection, the rows' positions q_pos
    (None: S_kv - S + s), and facts from the file's metadata."""

    q: Tensor
    k: Tensor
    v: Tensor
    selection: Selection
    q_pos: Tensor | None
    facts: dict[str, Any]

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Problem:
        """Return the problem on `device`, with q, k, v in `dtype` (None: unchanged)."""
        q, k, v = (tensor.to(device, dtype) for tensor in (self.q, self.k, self.v))
        q_pos = self.q_pos if self.q_pos is None else self.q_pos.to(device)
        return Problem(q, k, v, self.selection.to(device), q_pos, self.facts)


def read_problem(path: Path, block_size: int | None = None) -> Problem:
    """Read a problem from a file, to the CPU.

    The file has q, k, v; `ranges` [B,S,G,n,2] int32/int64 or `block_indices` [B,S,G,n] of any integer dtype (-1 is
    padding, but uint8 255 is a block); optionally `q_pos`. Ranges that are not blocks are merged, so that overlapping
    keys count once. Blocks must be whole, and distinct in a row.

    Args:
        path: the file.
        block_size: keys per block; by default the metadata entry `block_size`, or that field of the JSON entry
            `provenance`.

    Raises:
        ArgumentError: with the bad tensor and the content of the file.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no mapping
    except (OSError, safetensors.SafetensorError) as error:
        raise ArgumentError(
            "FILE", f"{path} ({error})", "a readable .safetensors file", "correct the path, or write it with save_file"
        ) from error
    parts = [f"{name} {list(x.shape)} {str(x.dtype).removeprefix('torch.')}" for name, x in tensors.items()]
    holds = f"the file holds {', '.join(parts) or 'no tensors'}"
    unknown = [name for name in tensors if name not in ALLOWED]
    for name in REQUIRED:
        if name not in tensors:
            similar = [other for other in unknown if other.lower().startswith(name)]
            raise ArgumentError(
                f"tensor {name!r}", f"missing; {holds}", _LAYOUT, f"rename {similar[0]!r} to {name!r}" if similar else f"add {name!r}"
            )
    if unknown:  # ignoring a misspelled q_pos would silently change the result
        meant = closest(unknown[0], ALLOWED)
        raise ArgumentError(
            f"tensor {unknown[0]!r}",
            f"unknown; {holds}",
            _LAYOUT,
            f"rename it to {meant!r}, or leave it out" if meant else "rename it, or leave it out",
        )
    given = [name for name in SELECTIONS if name in tensors]
    if len(given) != 1:
        what = f"given twice, as {' and '.join(given)}" if given else "missing"
        raise ArgumentError(
            "the selection",
            f"{what}; {holds}",
            _LAYOUT,
            "leave one of them out" if given else "add the tensor 'ranges', or 'block_indices' and a block size",
        )
    facts: dict[str, Any] = dict(metadata)
    with contextlib.suppress(ValueError, TypeError, RecursionError):  # provenance may be free text
        facts |= json.loads(metadata.get("provenance", "{}"))
    if block_size is None and "block_size" in facts:
        value = facts["block_size"]
        text = value if isinstance(value, str) else shown(value)
        if not text.isdecimal() or len(text) > 10 or int(text) < 1:
            raise ArgumentError(
                "block_size in the file's metadata",
                shown(value),
                "a whole number >= 1 and < 2^31",
                "write the size of the blocks, or pass --block-size",
            )
        block_size = int(text)
    if "block_indices" in tensors:
        if block_size is None:
            raise ArgumentError(
                "block_size", None, "the number of keys in a block", "pass --block-size, or write the metadata entry block_size"
            )
        selection = Selection.from_blocks(tensors["block_indices"], block_size).validate()
    elif block_size is not None:
        selection = Selection.from_ranges(tensors["ranges"], block_size).validate()
    else:
        selection = Selection.from_ranges(tensors["ranges"]).merge()
    return Problem(tensors["q"], tensors["k"], tensors["v"], selection, tensors.get("q_pos"), facts)


def write_result(path: Path, o: Tensor, lse: Tensor, decision: Decision) -> None:
    """Write o and lse, with the decision as the metadata entry `decision`. Raises ArgumentError."""
    tensors = {"o": o.detach().cpu().contiguous(), "lse": lse.detach().cpu().contiguous()}
    try:
        safetensors.torch.save_file(tensors, path, {"decision": decision.to_json()})
    except (OSError, safetensors.SafetensorError) as error:
        raise ArgumentError(
            "--out", f"{path} ({error})", "a file that can be written", "correct the path; its folder must exist"
        ) from error

"""Checks of what users write: wrong arguments, configuration files, flags, logs and files of tensors."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import safetensors.torch
import torch
import yaml
from torch import Tensor
from typer.testing import CliRunner

import nsa_sel
from nsa_sel.cli.app import app
from nsa_sel.core.request import DeviceInfo, example_request
from nsa_sel.errors import ArgumentError, ConfigError, NsaSelError
from nsa_sel.oracle import oracle_forward
from nsa_sel.selection import Selection
from nsa_sel.settings import config
from nsa_sel.settings.config import GPUS
from nsa_sel.settings.flags import CONFIG_FLAG, FLAGS
from nsa_sel.settings.schema import ConfigFile
from nsa_sel.telemetry.log import read_decisions
from tests import conftest
from tests.fuzz.calls import Ran, clear
from tests.fuzz.generators import ODD_TENSORS, Case, Facts
from tests.helpers.cases import make_qkv
from tests.helpers.paths import DATA, ROOT

# Wrong arguments


def _good_arguments(case: Case, door: str, block: int, backend: str | None) -> Facts:
    q, k, v = make_qkv(2, 4, 1, 2, 8, S_kv=12, seed=case.seed, device=case.device)
    blocks, rows = torch.tensor([0, 2], device=case.device).expand(2, 4, 1, 2).clone(), torch.arange(8, 12, device=case.device)
    selection, free = Selection.from_blocks(blocks, block), {"scale": None, "backend": backend}
    keys = {"q": q[0], "k": k[0].transpose(0, 1)[:4], "v": v[0].transpose(0, 1)[:4], "selection": selection.ranges[0]}
    caches = {"k_cache": k.transpose(1, 2), "v_cache": v.transpose(1, 2), "cache_seqlens": torch.tensor([12, 7], device=case.device)}
    return {
        "selection_attention": {"q": q, "k": k, "v": v, "selection": selection, "q_pos": rows, "return_lse": False, **free},
        "explain": {"q": q, "k": k, "v": v, "selection": selection, "q_pos": rows, "backend": backend},
        "selection_attention_varlen": {**keys, "cu_seqlens_q": [0, 1, 4], "cu_seqlens_k": [0, 1, 4], "align": None, **free},
        "selection_attention_with_kvcache": {"q": q, **caches, "selection": selection, "block_table": None, **free},
        "from_ranges": {"ranges": selection.ranges, "block_size": block, "max_length": None},
        "from_blocks": {"block_indices": blocks, "block_size": block, "block_counts": torch.full((2, 4, 1), 2, device=case.device)},
        "from_scores": {"scores": q[..., 0, :3], "n": 2, "block_size": 4, "first": 1, "local": 1, "S_kv": 12, "q_pos": None},
        "measure": {"S_kv": 12, "q_pos": torch.arange(4)},
    }[door]


def _mangled(x: Any, odd: str) -> Any:
    with contextlib.suppress(Exception):  # what can't be broken this way stays
        return eval(odd, {"x": x, "torch": torch, "np": np})
    return x


def check_bad(case: Case, f: Facts) -> Ran:
    """One or two arguments broken: an error of nsa_sel, or the right result for what they mean."""
    door, given = f["door"], _good_arguments(case, f["door"], f["block"], f["backend"])
    for share, odd in f["wrong"]:
        name = list(given)[int(share * len(given))]
        given[name] = _mangled(given[name], odd)
    if f["grads"] and isinstance(given.get("q"), Tensor) and given["q"].is_floating_point() and given["q"].is_leaf:
        given["q"].requires_grad_()
    of_rows = Selection(torch.zeros(1, 4, 1, 1, 2).int()) if door == "measure" else Selection
    try:
        result = getattr(nsa_sel if "q" in given else of_rows, door)(**given)
    except NsaSelError as error:
        return clear(error)
    if door == "from_blocks":
        _check_blocks(given, result)
    elif door == "selection_attention":
        dense = [x.resolve_neg() for x in (given["q"], given["k"], given["v"])]
        scale = None if given["scale"] is None else float(given["scale"])
        o, _ = oracle_forward(*dense, getattr(given["selection"], "ranges", given["selection"]), scale, given["q_pos"])
        result = result[0] if isinstance(result, tuple) else result
        torch.testing.assert_close(result.detach().cpu().double(), o, atol=0.02, rtol=0.02)
    elif isinstance(result, Tensor):
        assert bool(result.isfinite().all())
    return Ran(accepted=1)


def _check_blocks(given: Facts, result: Selection) -> None:
    """No number wrapped around: every block is where Python's own numbers say."""
    blocks, counts, size, limit = given["block_indices"], given["block_counts"], given["block_size"], 100
    blocks = blocks.unsqueeze(1) if blocks.dim() == 3 else blocks
    used = torch.full(blocks.shape[:-1], 99) if counts is None else counts.reshape(blocks.shape[:-1])
    rows = zip(blocks.flatten(0, -2).tolist(), used.flatten().tolist(), result.ranges.flatten(0, 2).tolist(), strict=True)
    for row, count, ranges in rows:
        named = [j for j in row[: max(0, int(count))] if j >= 0]
        wanted = {key for key in range(limit) if key // size in named}
        assert {key for a, b in ranges for key in range(max(0, a), min(b, limit))} == wanted, f"{ranges} for blocks {named} of {size}"


# Texts and files


def edit_text(text: str, edits: list[Any]) -> str:
    for share, op, length, new in edits:
        at = int(share * (len(text) + 1))
        if op == "cut":
            text = text[:at]
        elif op == "repeat":
            text = text[:at] + text[at : at + length] * 3 + text[at + length :]
        else:
            text = text[:at] + (new if op != "delete" else "") + text[at + (0 if op == "insert" else length) :]
    return text


def edit_tree(tree: Any, edits: list[Any]) -> Any:
    """The nested lists and dictionaries with some of their entries changed."""
    for share, op, value in edits:
        places: list[tuple[Any, Any]] = []
        pending = [tree]
        for inner in pending:
            entries = list(inner.items() if isinstance(inner, dict) else enumerate(inner) if isinstance(inner, list) else ())
            places += [(inner, key) for key, _ in entries]
            pending += [entry for _, entry in entries]
        if not places or op == "add":
            tree = {**tree, str(value)[:99]: value} if isinstance(tree, dict) else tree
            continue
        inner, key = places[int(share * len(places))]
        old = inner.pop(key)
        if op in ("set", "nest"):
            new = copy.deepcopy(value) if op == "set" else [old]
            inner.insert(key, new) if isinstance(inner, list) else inner.__setitem__(key, new)
        elif op == "rename" and isinstance(inner, dict):
            inner[str(value)[:99]] = old
    return tree


def check_config(case: Case, f: Facts) -> Ran:
    """A configuration file, or texts of flags: an error, or settings that decide on every device."""
    names = [*(flag.name for flag in FLAGS), CONFIG_FLAG]
    flags = {names[int(share * len(names))]: text.replace("\0", "").replace("\ud800", "\udcff") for share, text in f["flags"]}
    ran = Ran()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if not flags:
            shipped = sorted((ROOT / "configs").rglob("*.yaml"))
            tree = edit_tree(yaml.safe_load(shipped[int(f["file"] * len(shipped))].read_text()), f["tree"])
            text = edit_text(yaml.safe_dump(tree, sort_keys=False), f["text"]).encode("utf-8", "surrogatepass")
            flags = {CONFIG_FLAG: f"{folder}/fuzz.yaml"}
            Path(flags[CONFIG_FLAG]).write_bytes(text)
            with contextlib.suppress(ConfigError):
                assert isinstance(config.parse_config(text, "fuzz.yaml"), ConfigFile)
        stack.enter_context(patch.dict(os.environ, flags))
        stack.callback(conftest.forget)
        for device in (DeviceInfo(kind="cpu"), *GPUS.values()):
            try:
                nsa_sel.describe(nsa_sel.explain_request(example_request(needs_grad=True), device))
                ran["accepted"] += 1
            except NsaSelError as error:
                ran += clear(error)
    return ran


def _command(*arguments: str) -> Ran:
    """A command that ends by itself, with 0, 1 or a clear error, and writes no control characters."""
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    raw = sorted({hex(ord(c)) for c in result.output if (ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160})
    assert result.exit_code in (0, 1, 2)
    assert not raw, f"control characters {raw} in the output of {arguments[0]}"
    return Ran({"refused" if result.exit_code == 2 else "accepted": 1})


def check_log(case: Case, f: Facts) -> Ran:
    """Read edited lines of a log, and replay the decisions; or refuse the log with a clear error."""
    whole = (DATA / "decisions.jsonl").read_text().splitlines()
    lines = [edit_text(json.dumps(edit_tree(json.loads(whole[int(share * len(whole))]), tree)), text) for share, tree, text in f["lines"]]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        log.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
        try:
            return Ran({"accepted": len(read_decisions(log))})
        except ArgumentError as error:
            return clear(error)


def check_file(case: Case, f: Facts) -> Ran:
    """A file of tensors: computed, or refused."""
    q, k, v = make_qkv(1, 3, 1, 2, 8, S_kv=12, seed=case.seed)
    blocks = torch.tensor([0, 2]).expand(1, 3, 1, 2)
    tensors = {"q": q, "k": k, "v": v, **({"q_pos": torch.tensor([2, 5, 11])} if f["q_pos"] else {})}
    tensors |= {"block_indices": blocks} if f["blocks"] else {"ranges": Selection.from_blocks(blocks, 4).ranges}
    for name, op in f["tensors"].items():
        x = tensors.pop(name, torch.zeros(2))
        if op in (*ODD_TENSORS, "rename"):
            changed = _mangled(x, op)
            dense = isinstance(changed, Tensor) and changed.layout == torch.strided and not changed.is_nested
            kept = changed.detach().contiguous() if dense and changed.device.type == "cpu" else x
            tensors[name.upper() if op == "rename" else name] = kept
    tensors = {name: x.resolve_neg().clone().contiguous() for name, x in tensors.items()}
    data = safetensors.torch.save(tensors, None if f["metadata"] is None else {"block_size": f["metadata"]})
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(edit_tree(json.loads(data[8:size]), f["header"])).encode()
    data = bytearray(len(header).to_bytes(8, "little") + header + data[size:])
    for share, op in f["bytes"]:
        at = int(share * len(data))
        if op == "flip" and data:
            data[at] ^= 1 << case.seed % 8
        else:
            data[at:] = b"" if op == "cut" else b"{}" + data[at:]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "problem.safetensors").write_bytes(data)
        return _command("run", f"{folder}/problem.safetensors", "--device", "cpu", "--out", f"{folder}/out.safetensors")

"""Triton against packed SDPA over the lengths of a selection: the cases of bench_sel_triton.py, their rows as CSV, and a
report.

A case is N query rows of one KV group with H heads, each selecting L of 8192 keys as --dist says: few, the keys from 0
to L; many, 8 equal spans; mixed, 2, 4 or 8 random spans. Decoding, N sequences of one query each. On a GPU in bfloat16,
Triton beside packed SDPA; on a CPU in float32, numba beside it.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from nsa_sel.bench.core import cases, markdown, store
from nsa_sel.bench.core.cases import MANY, SPANS, Case, length_of
from nsa_sel.bench.core.contenders import DENSE, PACKED, backends_on, named, of_framework
from nsa_sel.bench.core.session import Job, able, run
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.core.timing import Timing
from nsa_sel.cli.output import output_file
from nsa_sel.errors import ArgumentError

RESULTS = Path("bench/results/sel_triton")
DECODE_BLOCK, DECODE_KEYS = 64, 4096  # l_sel of the decode matrix, and the keys of each sequence
SEED = {"N": "64,256,1024", "H": "4,8", "D": "64,128", "Dv": "64,128", "L_list": "16,32,64,128,256,512,1024", "dist": ",".join(SPANS)}
SEED_DECODE = SEED | {"N": "64,256", "H": "2,4", "L_list": "512,1024"}  # n_sel 8 and 16
QUICK = SEED | {"N": "64", "H": "4", "D": "64", "Dv": "64", "L_list": "64,1024", "dist": "few,many"}
QUICK_DECODE = QUICK | {"N": "16", "H": "2", "L_list": "512,1024"}
DERIVED = ("L", "bytes", "gb_s", "speedup")  # columns of the CSV that follow from the rows
TEXTS = (  # columns of text
    *("case", "distribution", "dtype", "direction", "backend", "device", "driver", "torch", "triton", "numba", "commit", "command"),
    "error",
)
SHOWN = ("case", "direction", "backend", "ms", "95% CI", "20th to 80th", "calls", "MB", "GB/s", "against packed", "MAE")
ROWS_CHECKED = 16


FILES = {"One contiguous range a row": "dense.csv", "Several ranges a row": "varlen.csv", "Decoding": "decode.csv"}  # parts of the matrix


def decode_case(N: int, H: int, D: int, Dv: int, n: int, dtype: str) -> Case:
    """Return one query of each of N sequences over `DECODE_KEYS` keys, in one group of H heads, with n random blocks."""
    name = f"decode-N{N}-H{H}-D{D}-Dv{Dv}-l{DECODE_BLOCK}-n{n}"
    return Case(name, "random", N, 1, DECODE_KEYS, 1, H, D, Dv, n, DECODE_BLOCK, dtype)


def jobs(
    device: str, *, N: str, H: str, D: str, Dv: str, L_list: str, dist: str, decode: bool, timing: Timing, backends: str, console: Console
) -> list[Job]:
    """Return the cases of the flags, each with the contenders that run on the device."""
    sizes = list(product(numbers("--N", N), numbers("--H", H), numbers("--D", D), numbers("--Dv", Dv)))
    dtype = "bfloat16" if device == "cuda" else "float32"
    lengths = numbers("--L_list", L_list)
    if max(lengths) > cases.SPAN_KEYS:
        raise ArgumentError("--L_list", max(lengths), f"at most {cases.SPAN_KEYS}, the keys of a case", "leave it out")
    if decode:
        odd = [L for L in lengths if L % DECODE_BLOCK or L > DECODE_KEYS]
        if odd:
            allowed = f"multiples of {DECODE_BLOCK}, at most {DECODE_KEYS}"
            raise ArgumentError("--L_list", ", ".join(map(str, odd)), allowed, "a decoded row selects whole blocks")
        found = [decode_case(*size, L // DECODE_BLOCK, dtype) for size in sizes for L in lengths]
    else:
        unknown = [name for name in dist.split(",") if name not in SPANS]
        if unknown:
            raise ArgumentError("--dist", ", ".join(unknown), f"{', '.join(SPANS)}, comma-separated", "pass some of these")
        odd = [L for L in lengths if set(dist.split(",")) - {"few"} and L % MANY]
        if odd:
            raise ArgumentError("--L_list", ", ".join(map(str, odd)), f"multiples of {MANY}", f"many and mixed cut L into {MANY} spans")
        found = [cases.span_case(kind, *size, L, dtype) for kind in dist.split(",") for size in sizes for L in lengths]
    everyone = [*of_framework("triton"), PACKED]
    everyone += [DENSE] * decode if device == "cuda" else [name for name in backends_on("cpu") if name != PACKED]
    contenders = able(named(backends or ",".join(everyone)), device, console.print)
    # The backward pass runs on the streams of its forward: several streams are for the forward alone.
    directions = ("decode",) if decode else ("fwd",) if timing.streams > 1 else ("fwd", "bwd")
    more = {"streams": timing.streams, "iters": timing.calls, "warmup": timing.warmup}
    return [Job(case, tuple(c for c in contenders if c.refuses(case) is None), directions, ROWS_CHECKED, timing, more) for case in found]


def moved_bytes(row: Row) -> int:
    """Return the bytes that the operation has to move: K and V that the rows select, once a row and group, and the tensors of rows and
    gradients.

    Forward and decoding: q read and o written. Backward: q, o and do read, dq written, dk and dv written once.
    """
    size = 4 if row["dtype"] == "float32" else 2
    rows, heads = row["B"] * row["S"] * row["G"], row["h"]
    keys, width = length_of(row["case"], row["n"], row["block"]), row["Dk"] + row["Dv"]
    if row["direction"] != "bwd":
        return int(size * rows * (keys * width + heads * width))
    return int(size * (rows * (keys * width + 2 * heads * width) + row["B"] * row["G"] * row["S_kv"] * width))


def with_derived(rows: Sequence[Row]) -> list[Row]:
    """Return rows with L, the bytes that must be moved, the GB/s that this comes to, and the speedup over packed SDPA in
    the same case.
    """

    def compared(row: Row) -> tuple[Any, ...]:
        return tuple(row.get(field) for field in ("case", "dtype", "direction", "streams", "commit", "device"))

    packed, found = {compared(row): row["ms_median"] for row in store.measured(rows) if row["backend"] == PACKED}, []
    for row in rows:
        ms, moved, other = row.get("ms_median"), moved_bytes(row), packed.get(compared(row))
        derived: Row = {"L": length_of(row["case"], row["n"], row["block"]), "bytes": moved}
        found.append({**row, **derived, "gb_s": moved / ms / 1e6 if ms else None, "speedup": other / ms if ms and other else None})
    return found


def to_csv(rows: Sequence[Row]) -> str:
    """Return all columns of the rows and the derived ones; `from_csv` reads the rows back."""
    complete, text = with_derived(rows), io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(column for row in complete for column in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(complete)
    return text.getvalue()


def from_csv(file: Path) -> list[Row]:
    """Return the rows of a file that `to_csv` made, without the derived columns; empty cells are left out."""
    try:
        with file.open(newline="") as opened:
            found = list(csv.DictReader(opened))
    except OSError as error:
        raise ArgumentError("the CSV file", f"{file} ({error.strerror})", "a readable file of bench_sel_triton", "mend the path") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ArgumentError("the CSV file", f"{file} ({error})", "a file of bench_sel_triton", "restore it, or measure again") from error
    lacking = {"case", "direction", "backend", "n", "block", "ms_p20", "ms_p80"} - set(found[0] if found else ())
    if lacking:
        raise ArgumentError("the CSV file", f"{file} without {', '.join(sorted(lacking))}", "a file of bench_sel_triton", "mend the path")

    def value(column: str, text: str) -> Any:
        if column in TEXTS or text in ("True", "False"):  # a commit may look like a number
            return text if column in TEXTS else text == "True"
        return float(text) if set(text) & set(".einf") else int(text)

    return [{name: value(name, text) for name, text in row.items() if text and name not in DERIVED} for row in found]


def report(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown, with what they were measured on."""
    lines = []
    commands = ", ".join(f"`{command}`" for command in dict.fromkeys(row["command"] for row in rows))
    for row in with_derived(rows):
        times, rate = (row.get("error"), "-", "-"), "-"
        if row.get("ms_median"):
            times = markdown.ms(row, 4), f"{row['ms_ci_low']:.4g} to {row['ms_ci_high']:.4g}", markdown.spread(row, 4)
            rate = f"{row['gb_s']:.3g}"
        mae = "-" if row.get("mae") is None else f"{row['mae']:.1e}"
        moved = f"{row['bytes'] / 1e6:.3g}", rate, markdown.factor(row["speedup"])
        lines.append((row["case"], row["direction"], row["backend"], *times, row.get("calls", "-"), *moved, mae))
    table = markdown.table(SHOWN, lines, left=3)
    return (
        f"# Selection attention over L\n\n{markdown.environment(rows[0])}, {commands}\n\n"
        "Whole calls in ms: the median, its 95% confidence interval, percentiles. MB: K and V that the rows select, once a\n"
        f"row, and the rows' own tensors. `{PACKED}` is the reference.\n\n{markdown.with_note(table)}\n"
    )


def parts(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows by what they select, a part of `FILES` each; parts without rows are left out."""
    one_range, several, decoding = FILES
    found: dict[str, list[Row]] = {part: [] for part in FILES}
    for row in rows:
        found[decoding if row["S"] == 1 else one_range if row["n"] == 1 else several].append(row)
    return {part: some for part, some in found.items() if some}


def write(folder: Path, out: Path, own: Sequence[Row] = (), csv_of_own: Path | None = None) -> list[Path]:
    """Write CSV files and report.md of the rows.jsonl of a folder into `out`.

    Of several environments or commits that the file has, the last one's rows. `own`: the rows of one command, for a CSV
    of their own.
    """
    file = folder / "rows.jsonl"
    rows = store.of_last_environment(store.read(file)) if file.exists() else []
    texts = {out / FILES[part]: to_csv(some) for part, some in parts(rows).items()}
    if rows:
        texts[out / "report.md"] = report(rows)
    if own and csv_of_own is not None:
        texts[csv_of_own] = to_csv(own)
    for target, text in texts.items():
        store.write_whole(target, text)
    return list(texts)


def measure(
    decodings: Sequence[bool], device: str, out: Path, console: Console, *, sizes: dict[str, str], iters: int | None, warmup: int,
    streams: int, backends: str, csv: Path | None, quick: bool,
) -> tuple[list[Row], list[Path]]:  # fmt: skip
    """Measure the matrix, its decode matrix or both, into out/rows.jsonl, and write the files. Return rows and files.

    sizes: N, H, D, Dv, L_list, dist; an empty one is that of the seed matrix. quick: one size of each, and fewer calls.
    """
    if csv is not None:
        output_file("--csv", csv)
    if any(decodings) and sizes["dist"]:
        raise ArgumentError("--dist", repr(sizes["dist"]), "none with --decode", "leave it out: decoded rows select whole blocks")
    if streams > 1 and device == "cpu":
        raise ArgumentError("--streams", streams, "1 on a CPU, which has no streams", "leave it out")
    timing, rows = Timing(calls=iters or (10 if quick else 50), warmup=warmup, streams=streams), list[Row]()
    for decode in decodings:
        default = (QUICK_DECODE if quick else SEED_DECODE) if decode else QUICK if quick else SEED
        asked = {**default, **{name: text for name, text in sizes.items() if text}}
        chosen = jobs(device, decode=decode, timing=timing, backends=backends, console=console, **asked)
        rows += run(chosen, out / "rows.jsonl", device, console)
    return rows, write(out, out, rows, csv)


def numbers(flag: str, text: str) -> list[int]:
    """Return the whole numbers of a comma-separated flag."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ArgumentError(flag, repr(text), "whole numbers > 0, comma-separated", "mend it")
    return [int(part) for part in parts]

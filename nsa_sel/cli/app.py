"""The command line `nsa-sel`. With --json, a command writes exactly one JSON document to stdout."""

from __future__ import annotations

import contextlib
import enum
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import nsa_sel
from nsa_sel.bench import command as benches
from nsa_sel.bench import threshold_optimizer
from nsa_sel.bench.core.command_line import INTERRUPTED, BenchCommand, device_of, echo
from nsa_sel.cli import doctor as examination
from nsa_sel.cli.output import output_file, printable, terminal_columns
from nsa_sel.core.call import device_info
from nsa_sel.core.decide import explain_request
from nsa_sel.core.decision import refusal
from nsa_sel.core.request import DeviceInfo, Request, example_request
from nsa_sel.errors import ArgumentError, BackendError, NsaSelError, needs_extra
from nsa_sel.settings.config import GPUS, SHARED_MEMORY
from nsa_sel.settings.schema import Direction
from nsa_sel.telemetry.describe import describe

app = typer.Typer(
    help="Selection attention of Native Sparse Attention: what runs here, why, and how fast.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_EXAMPLE = example_request()


# Values of options
Dtype = enum.StrEnum("Dtype", ["float16", "bfloat16", "float32", "float64"])
CacheFormat = enum.StrEnum("CacheFormat", {"ones": "e4m3", "tensor": "e4m3/tensor", "head": "e4m3/head", "page": "e4m3/page"})
Pass = enum.StrEnum("Pass", ["forward", "backward", "decode"])  # decode: one query per sequence
Where = enum.StrEnum("Where", ["auto", "cpu", "cuda"])
Choice = enum.StrEnum("Choice", ["nsa", "minimax", "moba", "infllm"])

AsJson = Annotated[bool, typer.Option("--json", help="Write one JSON document to stdout.")]
Backend = Annotated[str | None, typer.Option(help="Force this backend. If it refuses, print all reasons and fail.")]


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, typer.Option("--version", is_eager=True, help="Show the version.")] = False) -> None:
    if version:
        typer.echo(f"nsa-sel {nsa_sel.__version__}")
        raise typer.Exit


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Show which backend runs your calls on this machine, and why.

    Then list versions, devices, settings and their sources, backends and their missing requirements, and unknown NSA_*
    variables.
    """
    report = examination.examine()
    echo(_pretty(report) if as_json else examination.text(report, terminal_columns()))


@app.command()
def explain(
    B: Annotated[int, typer.Option("--B", min=1, help="Batch size.")] = _EXAMPLE.B,
    S: Annotated[int, typer.Option("--S", min=1, help="Query rows per sequence; 1 for decode.")] = _EXAMPLE.S,
    S_kv: Annotated[int | None, typer.Option("--S-kv", min=1, help=f"Keys; by default S, at least {_EXAMPLE.S_kv}.")] = None,
    G: Annotated[int, typer.Option("--G", min=1, help="KV groups.")] = _EXAMPLE.G,
    h: Annotated[int, typer.Option("--h", min=1, help="Query heads per group.")] = _EXAMPLE.h,
    Dk: Annotated[int, typer.Option("--Dk", min=1, help="Head dimension of q and k.")] = _EXAMPLE.Dk,
    Dv: Annotated[int, typer.Option("--Dv", min=1, help="Head dimension of v.")] = _EXAMPLE.Dv,
    n: Annotated[int, typer.Option("--n", min=1, help="Ranges per row.")] = _EXAMPLE.n,
    block_size: Annotated[int, typer.Option(min=0, help="Keys per block; 0: ranges that are not blocks.")] = _EXAMPLE.block_size or 0,
    max_length: Annotated[
        int | None, typer.Option("--max-length", "--L", min=1, help="Maximum keys per row (L); by default n blocks, at most S_kv.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of q, k, v.")] = Dtype.bfloat16,
    needs_grad: Annotated[bool, typer.Option("--needs-grad/--no-grad", help="With or without gradients.")] = _EXAMPLE.needs_grad,
    page_size: Annotated[int | None, typer.Option(min=1, help="Keys per page of a paged KV cache.")] = None,
    quantized: Annotated[CacheFormat | None, typer.Option(help="Format of a quantized KV cache, and what each scale covers.")] = None,
    choose: Annotated[Choice | None, typer.Option(help="Explain how this model's choice of n blocks would run instead.")] = None,
    loss: Annotated[
        bool, typer.Option("--loss", help="Explain an indexer's loss over these keys instead; Dv is its head dimension.")
    ] = False,
    device: Annotated[
        str, typer.Option(help=f"auto, cpu or cuda of this machine, {', '.join(GPUS)}, or a compute capability such as sm89.")
    ] = "auto",
    backend: Backend = None,
    as_json: AsJson = False,
) -> None:
    """Show which backend would run a call of this shape, and why the others would not. Runs nothing.

    With auto, cpu or cuda, packages are those of this machine; for another GPU, all count as installed. Predicted times
    assume that neighboring rows share blocks as in text. Exit code 2 if no backend can run the call.
    """
    with _errors(as_json):
        S_kv = max(S, _EXAMPLE.S_kv) if S_kv is None else S_kv
        if S > S_kv:
            raise ArgumentError("--S", S, f"at most S_kv = {S_kv}", "raise --S-kv")
        if max_length is None:
            max_length = min(S_kv, n * block_size if block_size else S_kv)
        request = Request(
            B=B, S=S, S_kv=S_kv, G=G, h=h, Dk=Dk, Dv=Dv, n=n, block_size=block_size or None, max_length=max_length,
            dtype=dtype.value, needs_grad=needs_grad, page_size=page_size, quantized=quantized.value if quantized else None,
        )  # fmt: skip
        if loss and choose is not None:
            raise ArgumentError("--loss", f"given with --choose {choose.value}", "one of them", "leave one out")
        request = request if choose is None else _choosing_request(request, choose)
        request = msgspec.structs.replace(request, kind="index_loss", page_size=None, quantized=None) if loss else request
        decision = explain_request(request, _device_facts(device), backend, all_installed=device not in list(Where))
        echo(decision.to_json() if as_json else describe(decision, terminal_columns()))
        message = refusal(decision)
        if message is not None:
            if as_json:
                raise typer.Exit(2)
            raise BackendError(message, decision)


@app.command()
def demo(
    out_dir: Annotated[Path, typer.Option(help="Folder of demo.png and demo.json.")] = Path("demo-output"),
    as_json: AsJson = False,
) -> None:
    """Run attention of a language model on every available backend; check, time and draw it. Then run a layer of
    MiniMax-M3 in transformers and on nsa-sel, if transformers is installed. Exit code 1 if one is wrong."""
    with _errors(as_json):
        with needs_extra("report", "nsa-sel demo"):
            from nsa_sel.cli import demo as demonstration
            from nsa_sel.cli import demo_model
        picture, figures = (output_file("--out-dir", out_dir / name) for name in ("demo.png", "demo.json"))
        setting = demonstration.prepare()
        if not as_json:
            echo(demonstration.introduction(setting))
        with _progress(as_json) as advance:
            result = demonstration.run(setting, advance)
            advance("a layer of MiniMax-M3", 1.0)
            result = msgspec.structs.replace(result, model=demo_model.run(setting.problem.q.device.type))
        document = _pretty(result)
        try:
            figures.write_text(document + "\n")
            demonstration.draw(setting.problem, result, picture)
        except OSError as error:
            raise ArgumentError("--out-dir", f"{out_dir} ({error.strerror})", "a folder that can be written", "choose another") from error
        echo(document if as_json else f"{demonstration.text(result)}\n\nwritten: {picture}, {figures}")
        if not result.passed or getattr(result.model, "passed", True) is False:
            raise typer.Exit(1)


@app.command()
def tune(
    quick: Annotated[bool, typer.Option("--quick", help="Try few kernel configs for one case. Takes minutes.")] = False,
    backend: Annotated[str | None, typer.Option(help="Tune only this Triton backend.")] = None,
    direction: Annotated[Pass | None, typer.Option(help="Tune only this direction.")] = None,
    L: Annotated[list[int] | None, typer.Option("--L", min=1, help="Selected keys per row; repeatable.")] = None,
    h: Annotated[int | None, typer.Option("--h", min=1, help="Query heads per group.")] = None,
    Dk: Annotated[int | None, typer.Option("--Dk", min=1, help="Head dimension of q and k.")] = None,
    Dv: Annotated[int | None, typer.Option("--Dv", min=1, help="Head dimension of v.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Dtype of q, k, v.")] = None,
    minutes: Annotated[float, typer.Option(min=0, help="Stop after this time. The next run continues.")] = 60,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the measurements without running them. Needs no GPU.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure on this GPU the smallest L for which Triton is faster, the best kernel configs, and cost models. Later
    calls use them.

    Without --backend, --L, --h, --Dk, --Dv, --dtype: the thresholds, the committed cases, and the costs (not with
    --quick). Measurements are saved, so the next run continues where this one stopped. NSA_SEL_AUTOTUNE=off ignores the
    results.
    """
    with _errors(as_json):
        from nsa_sel.bench.tune import command as tuning

        sizes = {"L": L, "h": h, "Dk": Dk, "Dv": Dv, "dtype": dtype and dtype.value}
        plan = tuning.plan(backend, cast(Direction, direction.value) if direction else None, sizes, quick=quick, dry_run=dry_run)
        if dry_run:
            echo(_pretty(plan.document()) if as_json else plan.text())
            return
        if plan.note and not as_json:
            echo(f"note: {plan.note}")
        with _progress(as_json) as advance:
            outcome = tuning.measure(plan, minutes, quick, advance)
        echo(_pretty(outcome.document()) if as_json else outcome.text())


@contextlib.contextmanager
def _errors(as_json: bool) -> Iterator[None]:
    """Print nsa-sel's own errors without a traceback and exit with code 2. Exit with code 130 after Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(INTERRUPTED) from interrupt
    except NsaSelError as error:
        if as_json:
            decision = error.decision if isinstance(error, BackendError) else None
            echo(_pretty({"error": str(error), "decision": decision}))
        else:
            typer.echo(printable(f"error: {error}"), err=True)
        raise typer.Exit(2) from error


@contextlib.contextmanager
def _progress(as_json: bool) -> Iterator[Callable[[str, float], None]]:
    """Yield a function of (step, share done) that updates a progress bar on stderr. Draws nothing without a terminal."""
    columns = (TextColumn("{task.description:<42}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=as_json or not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda what, done: progress.update(task, description=what, completed=done)


app.command(cls=BenchCommand)(_errors(as_json=False)(benches.bench))
app.command("threshold")(_errors(as_json=False)(threshold_optimizer.main))


def _choosing_request(request: Request, model: Choice) -> Request:
    """Return the request by which `model` chooses the blocks that `request` attends to. Only NSA's has values (Dv) and
    gradients."""
    if request.block_size is None:
        raise ArgumentError("--block-size", 0, "keys of a block", "blocks are chosen: pass their size")
    if request.needs_grad and model != "nsa":
        raise ArgumentError("--needs-grad", True, f"--no-grad with --choose {model}", "its choice has no gradient")
    size, groups = request.block_size, request.G
    fields: dict[Choice, dict[str, Any]] = {
        Choice.nsa: {"compress": (32, 16)},
        Choice.infllm: {"compress": (32, 16), "pool": ("weights", "sum", "max"), "Dv": 0},
        Choice.minimax: {"compress": (1, 1), "pool": ("logits", "sum", "max"), "Dv": 0, "h": 1},
        Choice.moba: {"compress": (size, size), "pool": ("logits", "sum", "max"), "Dv": 0, "G": groups * request.h, "h": 1},
    }
    common = {"kind": "choose", "max_length": request.S_kv, "page_size": None, "quantized": None}
    return msgspec.structs.replace(request, **common, **fields[model])


def _device_facts(name: str) -> DeviceInfo:
    """Return the facts of a GPU by name or compute capability, or of this machine's device."""
    if name in GPUS:
        return GPUS[name]
    capability = re.fullmatch(r"sm_?(\d{2,3})", name)
    if capability and (sm := int(capability[1])) in SHARED_MEMORY:
        return DeviceInfo(kind="cuda", name="any GPU", sm=sm, shared_memory=SHARED_MEMORY[sm])
    if name not in list(Where):
        raise ArgumentError("--device", repr(name), ", ".join([*Where, *GPUS, *(f"sm{sm}" for sm in SHARED_MEMORY)]), "pass one of these")
    return device_info(torch.device(device_of(name)))


def _pretty(document: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(document)).decode()

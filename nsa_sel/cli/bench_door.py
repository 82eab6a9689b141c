"""The one door from the command line and the demo to `nsa_sel.bench`, whose modules are imported when a function here is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nsa_sel.selection import Selection

if TYPE_CHECKING:
    from typer.core import TyperCommand

    from nsa_sel.bench.tune.command import Plan
    from nsa_sel.settings.schema import Way


# Commands


def commands() -> tuple[tuple[Callable[..., None], type[TyperCommand]], ...]:
    """Return the bodies of `nsa-sel bench` and `nsa-sel threshold`, and the classes of their commands."""
    from typer.core import TyperCommand

    from nsa_sel.bench import command
    from nsa_sel.bench.core.command_line import BenchCommand

    return (command.bench, BenchCommand), (command.threshold, TyperCommand)


def tuning_plan(backend: str | None, way: Way | None, *, quick: bool, dry_run: bool, **sizes: Any) -> Plan:
    """What `nsa-sel tune` will measure. sizes: L, h, Dk, Dv and dtype, None where the user gives none."""
    from nsa_sel.bench.tune import command

    return command.plan(backend, way, command.Sizes(**sizes), quick=quick, dry_run=dry_run)


def tune(plan: Plan, minutes: float, quick: bool, advance: Callable[[str, float], None]) -> tuple[Any, str]:
    """Measure a plan, and return what was found: as a document and as text."""
    from nsa_sel.bench.tune import command

    found = command.measure(plan, minutes, quick, advance)
    return found.document(), found.text()


# Measurements and baselines of the demo


def one_call(work: Callable[[], object], device: str) -> float:
    """Milliseconds of one call on "cuda", whose L2 cache is flushed before, or on "cpu"."""
    from nsa_sel.bench.core import timing

    return timing.one_call(work, device)


def percentiles(times: Sequence[float]) -> tuple[float, float, float]:
    """The median, 20th and 80th percentile."""
    from nsa_sel.bench.core import timing

    return timing.spread(times)[:3]


def dense_causal_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """o of attention to all keys up to each row's position, by torch's SDPA."""
    from nsa_sel.bench.core import baselines

    return baselines.dense_causal_sdpa(q, k, v, kernel="any")


def masked_sdpa(selection: Selection, S_kv: int, q_pos: Tensor | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """o from q, k, v by torch's SDPA with a dense mask, which is made once: it takes longer than the attention."""
    from nsa_sel.bench.core import baselines

    mask = baselines.token_mask(selection, S_kv, q_pos)
    return lambda q, k, v: baselines.masked_sdpa(q, k, v, mask)


def real_selection(G: int) -> Selection:
    """8192 rows of 16 blocks that a language model selects, for G groups."""
    from nsa_sel.bench.core import cases

    return cases.real_selection(G, "cpu")

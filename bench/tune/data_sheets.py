"""What data sheets say of a GPU (configs/data_sheets.yaml), and from it how much more work costs there than on the GPU with rows.

The price of a unit of work on another GPU is the measured one times the measured GPU's rate over the other's, resource by resource.
Efficiency is taken to be the same: what a kernel reaches of a resource on the one GPU it reaches on the other.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import msgspec
import yaml

from nsa_sel.bench.core.environment import ROOT
from nsa_sel.settings.devices import GPUS

SHEETS = "configs/data_sheets.yaml"
MEASURED = "h200"
KEPT_IN_L2 = 8192 * 4 * 256 * 2 / 1e6  # MB: K and V of 8,192 tokens, 4 KV heads of 128 + 128 columns, 16 bits


class Figure(NamedTuple):
    """A number of a data sheet, the key of its source, and how that was read: "vendor", "copy" or "secondary"."""

    value: float
    source: str
    read: str


class Sheet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The figures of one GPU; the file says in which units."""

    dram: Figure
    tensor: Figure
    l2: Figure
    sms: Figure
    clock: Figure

    @property
    def figures(self) -> tuple[Figure, ...]:
        return (self.dram, self.tensor, self.l2, self.sms, self.clock)

    @property
    def keeps_keys(self) -> bool:
        """Whether the L2 cache holds K and V of a text of 8,192 tokens."""
        return self.l2.value >= KEPT_IN_L2

    @property
    def issue(self) -> float:
        """Clocks of all multiprocessors per microsecond. Every one issues 4 warps' instructions a clock, and loads 64 bytes of the L2."""
        return self.sms.value * self.clock.value


class Sheets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file."""

    sources: dict[str, str]
    gpus: dict[str, Sheet]


@cache
def sheets() -> Sheets:
    """The committed data sheets; names of GPUs are those of `nsa_sel.settings.devices.GPUS`, but for cards that have none there."""
    return msgspec.convert(yaml.safe_load((ROOT / SHEETS).read_text()), Sheets, strict=False)


def factors(name: str, of: str = MEASURED) -> dict[str, float]:
    """The time of a unit of work on GPU `name` over that on `of`, by resource (`nsa_sel.settings.prices.RESOURCES`), to four digits."""
    here, there = sheets().gpus[name], sheets().gpus[of]
    dram = there.dram.value / here.dram.value
    # NVIDIA publishes the L2 cache's bandwidth for the A100 alone: it is taken to grow with the multiprocessors' loads.
    by_resource = {
        "dram": dram,
        "l2": there.issue / here.issue if here.keeps_keys else dram,
        "tensor": there.tensor.value / here.tensor.value,
        "issue": there.issue / here.issue,
        "clock": there.clock.value / here.clock.value,
    }
    return {resource: float(f"{found:.4g}") for resource, found in by_resource.items()}


def least_tensor_ms(name: str) -> float:
    """Milliseconds of a TFLOP at the tensor cores' full rate, to four digits."""
    return float(f"{1e3 / sheets().gpus[name].tensor.value:.4g}")


def words(name: str) -> str:
    """What a profile says of the figures."""
    sheet = sheets().gpus[name]
    kinds = {how: sum(figure.read == how for figure in sheet.figures) for how in ("vendor", "copy", "secondary")}
    read = ", ".join(f"{count} {how}" for how, count in kinds.items() if count)
    return (
        f"{GPUS[name].name}: {sheet.dram.value:g} GB/s, {sheet.tensor.value:g} dense bf16 TFLOPS, L2 {sheet.l2.value:g} MB,"
        f" {sheet.sms.value:g} multiprocessors at {sheet.clock.value:g} MHz ({SHEETS}; figures by how they were read: {read})"
    )

"""Which backend chooses fastest? Times of `compressed_attention` with each, which the cost models of the kind "choose" are fitted to.

    python -m nsa_sel.bench.questions.choosers --out bench/results/h200/choosers.jsonl

The rows that `nsa-sel tune` measures of choosing, alone: forward and backward, each backend checked against choose-torch. A file below
bench/results/h200/ is read by bench/tune/derive.py, which writes the models into the H200's profile. Run again, it resumes.
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from nsa_sel.bench.core import environment
from nsa_sel.bench.core.command_line import Only, Out, echo, need_gpu, program, stderr_console
from nsa_sel.bench.core.store import RowFile, first_line
from nsa_sel.bench.questions.speed import SHOWN, table
from nsa_sel.bench.tune import choice_times, costs
from nsa_sel.core.call import device_info
from nsa_sel.settings.config import settings_for


def main(
    out: Out,
    only: Only = "",
    rep: Annotated[float, typer.Option(help="milliseconds that the timed calls of a row should fill")] = costs.REP,
) -> None:
    """Measure the rows that the file lacks; print all of them. A backend that fails is reported in one line and passed over."""
    need_gpu("choosers")
    device = device_info(torch.device("cuda", torch.cuda.current_device()))
    settings, file, measure = settings_for(device), RowFile(out), costs.Runner(rep=rep)
    facts, console, found = environment.stamp(), stderr_console(), []
    for row in (row for way in costs.ORDER for row in choice_times.wanted(device, settings, way) if only in row["case"]):
        asked = {**row, **facts}
        if asked not in file:
            try:
                file.add({**asked, **measure(row)})
            except Exception as error:
                console.print(f"{row['case']} {row['direction']} {row['backend']}: {first_line(error)}")
                continue
        found.append(file[asked])
    echo(table(found, (*SHOWN[:7], "same_blocks")))


if __name__ == "__main__":
    program(main)

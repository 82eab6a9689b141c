"""Triton against packed SDPA over the lengths of a selection: the seed matrix and the decode matrix.

    python -m nsa_sel.bench.bench_sel_triton            # rows, CSV and Markdown under bench/results/sel_triton/<date>/
    python -m nsa_sel.bench.bench_sel_triton --N 64 --H 8 --D 128 --Dv 128 --L_list 64,1024 --dist few
    python -m nsa_sel.bench.bench_sel_triton --decode

The command is `nsa-sel bench`; core/matrix.py has the cases. Run again, it resumes.
"""

from nsa_sel.bench.command import bench
from nsa_sel.bench.core.command_line import program

if __name__ == "__main__":
    program(bench)

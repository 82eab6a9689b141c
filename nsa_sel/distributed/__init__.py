"""Run on several GPUs with torch.distributed: context parallelism and tensor parallelism. See docs/distributed.md."""

from nsa_sel.distributed.agreement import check_ranks
from nsa_sel.distributed.context import context_parallel_attention
from nsa_sel.distributed.cost import Exchange, exchanged_bytes, exchanges, rows_bytes
from nsa_sel.distributed.layer import context_parallel, context_parallel_nsa_attention, tensor_parallel
from nsa_sel.distributed.slices import rank_rows

__all__ = [
    "Exchange",
    "check_ranks",
    "context_parallel",
    "context_parallel_attention",
    "context_parallel_nsa_attention",
    "exchanged_bytes",
    "exchanges",
    "rank_rows",
    "rows_bytes",
    "tensor_parallel",
]

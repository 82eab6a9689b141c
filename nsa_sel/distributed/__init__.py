"""Run on several GPUs with torch.distributed: context parallelism and tensor parallelism. See docs/distributed.md."""

from nsa_sel.distributed.agreement import check_ranks
from nsa_sel.distributed.context import context_parallel_attention
from nsa_sel.distributed.context_layer import context_parallel, context_parallel_nsa_attention
from nsa_sel.distributed.cost import Exchange, exchanged_bytes, exchanges, rows_bytes
from nsa_sel.distributed.cut import rank_rows
from nsa_sel.distributed.tensor import tensor_parallel

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

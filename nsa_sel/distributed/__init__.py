"""Several GPUs, on torch.distributed: context parallelism, ranks that agree, and sharding rules for DTensors. See docs/distributed.md."""

from nsa_sel.distributed.agreement import check_ranks
from nsa_sel.distributed.context import context_parallel_attention
from nsa_sel.distributed.cost import Exchange, exchanged_bytes, exchanges, rows_bytes

__all__ = ["Exchange", "check_ranks", "context_parallel_attention", "exchanged_bytes", "exchanges", "rows_bytes"]

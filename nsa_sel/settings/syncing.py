"""One table of what was tuned, launches, thresholds and costs, for all ranks of a torch.distributed job."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from nsa_sel.core.call import device_info
from nsa_sel.core.decide import forget_decisions
from nsa_sel.core.request import DeviceInfo
from nsa_sel.errors import NsaSelError
from nsa_sel.settings import tuned
from nsa_sel.settings.config import settings_for


def sync_tuning(device: DeviceInfo | None = None) -> str | None:
    """Use what rank 0's user tuned, or its absence, on every rank; all ranks call it, after init_process_group. A collective.

    Returns the fingerprint of the table that all ranks now use on `device` (by default the current one), None for the committed
    launches. Raises NsaSelError on all ranks, naming rank and field, where rank 0's table does not hold for another rank's
    environment, or where ranks differ in NSA_SEL_AUTOTUNE. Without this call, launches that were tuned are ignored in a distributed
    job: a look at rank 0 at the first call would hang where a rank makes none.
    """
    from torch import distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise NsaSelError(
            "sync_tuning is called outside a distributed job; allowed: after torch.distributed.init_process_group. Remedy: move it."
        )
    if device is None:
        here = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        device = device_info(here)
    table = tuned.read(device)
    mine = (tuned.stamp_of(device), settings_for(device).autotune == "off", table and (table.name, table.data))
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, msgspec.msgpack.encode(mine))
    found = [msgspec.msgpack.decode(rank, type=tuple[tuned.Stamp, bool, tuple[str, bytes] | None]) for rank in ranks]
    stamp, ignored, shared = found[0]
    for rank, (other, other_ignored, _) in enumerate(found):
        if other_ignored != ignored:
            words = f"NSA_SEL_AUTOTUNE is {'off' if other_ignored else 'not off'} there, and the other way round on rank 0"
            raise NsaSelError(f"rank {rank} would launch other kernels than rank 0: {words}. Remedy: set it alike on all ranks.")
        differing = other.differences(stamp)
        if shared is not None and not ignored and differing:
            raise NsaSelError(
                f"what rank 0 tuned does not hold on rank {rank}: {'; '.join(differing)} (rank 0's first). Remedy: run all ranks in one"
                " environment, or set NSA_SEL_AUTOTUNE=off."
            )
    agreed = None if shared is None or ignored else tuned.parse(shared[1], shared[0])[1]
    tuned.share(device, agreed)
    forget_decisions()
    return agreed.fingerprint if agreed else None

"""Share one table of tuned kernel configs, thresholds and costs among all ranks of a torch.distributed job."""

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
    """Use rank 0's tuning results on every rank. A collective: all ranks must call it, after init_process_group.

    A distributed job that does not call it ignores tuning results. Sharing them at the first call would hang if a rank makes no call.

    Args:
        device: by default this rank's current device.

    Returns:
        The fingerprint of the table that all ranks now use on `device`, or None if rank 0 has none and the committed configs are used.

    Raises:
        NsaSelError: outside of a distributed job; on all ranks, if rank 0's table is for another environment than a rank's, or if ranks
            differ in NSA_SEL_AUTOTUNE. The message has the rank and the field.
    """
    from torch import distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise NsaSelError(
            "sync_tuning is called outside a distributed job; allowed: after torch.distributed.init_process_group. Remedy: move the call."
        )
    if device is None:
        cuda = torch.cuda.is_available()
        device = device_info(torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"))
    table = tuned.read(device)
    mine = (tuned.stamp_of(device), settings_for(device).autotune == "off", table and (table.name, table.data))
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, msgspec.msgpack.encode(mine))
    decoded = [msgspec.msgpack.decode(rank, type=tuple[tuned.Stamp, bool, tuple[str, bytes] | None]) for rank in ranks]
    stamp, ignored, shared = decoded[0]
    for rank, (other, other_ignored, _) in enumerate(decoded):
        if other_ignored != ignored:
            raise NsaSelError(
                f"rank {rank} would use other kernel configs than rank 0: NSA_SEL_AUTOTUNE is {'off' if other_ignored else 'not off'}"
                " there, and the opposite on rank 0. Remedy: set it to the same value on all ranks."
            )
        differing = other.differences(stamp)
        if shared is not None and not ignored and differing:
            raise NsaSelError(
                f"rank 0's tuning results are not for the environment of rank {rank}: {'; '.join(differing)} (rank 0's first)."
                " Remedy: run all ranks in one environment, or set NSA_SEL_AUTOTUNE=off."
            )
    agreed = None if shared is None or ignored else tuned.parse(shared[1], shared[0])[1]
    tuned.share(device, agreed)
    forget_decisions()
    return agreed.fingerprint if agreed else None

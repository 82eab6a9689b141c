"""What tensor_map tells the driver, whose function is replaced: dimensions, strides and the box, innermost first."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from nsa_sel.backends.cupy_cuda import tensor_map
from nsa_sel.backends.launcher import cuda_driver
from nsa_sel.errors import BackendError
from nsa_sel.quantize import STORED

runtime = pytest.importorskip("cupy_backends.cuda.api.runtime", reason="no CuPy; remedy: pip install cupy-cuda13x")


class Driver:
    """Writes a mark where the map belongs, and remembers what it was told."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.told = status, []  # type: ignore[var-annotated]

    def cuTensorMapEncodeTiled(self, at: Any, dtype: int, rank: Any, address: Any, *rest: Any) -> int:
        assert at.value % cuda_driver.MAP_ALIGNMENT == 0
        ctypes.memset(at.value, 0xAB, cuda_driver.MAP_BYTES)
        self.told.append((dtype, rank.value, address.value, *(list(numbers) for numbers in rest[:4]), rest[4:]))
        return self.status


def encoded(monkeypatch: pytest.MonkeyPatch, x: torch.Tensor, driver: Driver) -> bytes:
    monkeypatch.setattr(runtime, "setDevice", lambda device: None)
    monkeypatch.setattr(cuda_driver, "encode", lambda: driver.cuTensorMapEncodeTiled)
    tensor_map._encoder.cache_clear()
    return tensor_map.tensor_map(x, 64, 64)


def test_a_cache_of_other_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    k = torch.empty(3, 100, 2, 128, dtype=torch.bfloat16).transpose(1, 2)  # [B,S_kv,G,D] seen as [B,G,S_kv,D]
    assert encoded(monkeypatch, k, driver) == b"\xab" * 128
    assert tensor_map.tensor_map(k, 64, 64) == b"\xab" * 128
    ((dtype, rank, address, sizes, steps, box, ones, how),) = driver.told  # once: the second was remembered
    assert (dtype, rank, address) == (tensor_map.BFLOAT16, 4, k.data_ptr())
    assert (sizes, steps) == ([128, 100, 2, 3], [2 * 256, 2 * 128, 2 * 25600])
    assert (box, ones, how) == ([64, 64, 1, 1], [1, 1, 1, 1], (0, tensor_map.SWIZZLE_128_BYTES, tensor_map.PROMOTE_TO_256_BYTES, 0))


@pytest.mark.parametrize(("D", "swizzle"), [(64, tensor_map.SWIZZLE_64_BYTES), (128, tensor_map.SWIZZLE_128_BYTES)])
def test_e4m3_is_loaded_as_bytes(monkeypatch: pytest.MonkeyPatch, D: int, swizzle: int) -> None:
    """A tile has all columns, and is swizzled by as many bytes."""
    driver = Driver()
    k = torch.empty(3, 100, 2, D).to(STORED).transpose(1, 2)
    encoded(monkeypatch, k, driver)
    tensor_map.tensor_map(k, 64, D, promoted=False)
    dtype, _, _, sizes, steps, box, _, how = driver.told[-1]
    assert (dtype, sizes, steps, box) == (tensor_map.UINT8, [D, 100, 2, 3], [2 * D, D, 200 * D], [D, 64, 1, 1])
    assert how == (0, swizzle, tensor_map.NO_PROMOTION, 0)


def test_one_element_may_have_any_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    encoded(monkeypatch, torch.empty(5000, dtype=torch.float16).as_strided((1, 1, 10, 64), (3, 1, 64, 1)), driver)
    assert driver.told[0][0] == tensor_map.FLOAT16
    assert driver.told[0][4] == [128, 128, 128]


def test_what_the_driver_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match=r"error 1\).*\(1, 1, 10, 64\).*allowed: 16-byte.*Remedy"):
        encoded(monkeypatch, torch.empty(1, 1, 10, 64).half(), Driver(status=1))

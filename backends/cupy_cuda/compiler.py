"""Compile kernels/*.cu to cubins with NVRTC through CuPy, once per GPU and class of shapes, and cache them on disk.

A cached file's name holds a hash of the source, its includes, the macros, the options and NVRTC's version.
"""

from __future__ import annotations

import functools
import hashlib
import re
import warnings
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from nsa_sel.errors import BackendError
from nsa_sel.settings import private
from nsa_sel.settings.tuned import cache_folder

Constants = tuple[tuple[str, int], ...]  # macros, in the order of their names
OPTIONS = ("-std=c++17", "-lineinfo")
OPTIONAL = {  # macros that a launcher may leave out, and their values then; the sources that read them explain them
    "PAGE": -1, "PACKED": 0, "JOINED": 0, "SHARED_BY": 1, "WINDOW": 0, "COMPRESS_BLOCK": 0, "COMPRESS_STRIDE": 1,  # problem.cuh
    "E4M3": 0, "PAGE_SCALES": 0,  # stored_tiles.cuh
    "ORDER_TOKENS": 0, "FEW_TOKENS": 0, "MIXED_TILES": 0,  # tile_plan.cuh
    "REPEATED_BLOCK": 0, "NAMED_WORDS": 0,  # key_tiles.cuh, named_blocks.cuh
    "CLUSTER": 1, "LISTED": 0,  # hardware.cuh, forward_blocks.cu
    "ONE_PAGE": 0, "SMALL_BLOCK": 0, "BY_UNITS": 0,  # key_tiles.cuh, key_to_rows.cuh, order_segments.cu
}  # fmt: skip
_INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)
_ERROR = re.compile(r"^(?P<file>[\w.]+)\((?P<line>\d+)\): (?:catastrophic )?error: *(?P<what>.*)", re.MULTILINE)


def constants(**values: int) -> Constants:
    return tuple(sorted(values.items()))


def definitions(macros: Constants) -> list[str]:
    """Return the compiler's options that define the macros, including optional ones."""
    return [f"-D{name}={value}" for name, value in (OPTIONAL | dict(macros)).items()]


def architecture(sm: int, own: bool = False) -> str:
    """Return the architecture name of compute capability sm/10. own: with architecture-specific instructions, e.g.
    `wgmma`."""
    return f"sm_{sm}{'a' if own else ''}"


def cubin(source: str, macros: Constants, arch: str) -> bytes:
    """Return the cubin of a file in kernels/ for `arch`, from the cache if possible. Raises BackendError like
    `compile_source`."""
    from cupy_backends.cuda.libs import nvrtc

    folder = cache_folder()
    if folder is None:
        return compile_source(source, macros, arch)[0]
    key = repr((OPTIONS, definitions(macros), arch, nvrtc.getVersion(), sorted(sources(source).items())))
    file = folder / "cubins" / f"{Path(source).stem}-{arch}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.cubin"
    code = _read(file)
    if code is None:
        code, _ = compile_source(source, macros, arch)
        _write(file, code)
    return code


def compile_source(source: str, macros: Constants, arch: str, extra: Iterable[str] = ()) -> tuple[bytes, str]:
    """Compile a file in kernels/; return its cubin and the compiler's log.

    Raises BackendError with the first error and its source line, or if NVRTC does not support `arch`.
    """
    from cupy_backends.cuda.libs import nvrtc

    files, main = sources(source), Path(source).name
    headers = {name: text.encode() for name, text in files.items() if name != main}
    program = nvrtc.createProgram(files[main], main, list(headers.values()), [name.encode() for name in headers])
    try:
        nvrtc.compileProgram(program, [f"-arch={arch}", *OPTIONS, *extra, *definitions(macros)])
        return nvrtc.getCUBIN(program), nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        version = ".".join(map(str, nvrtc.getVersion()))
        what = _first_error(nvrtc.getProgramLog(program), files) or error
        remedy = "an NVRTC that knows this GPU, as `pip install 'nsa-sel[cuda13]'` brings it, or another backend"
        if "not supported on .target" in str(what):
            remedy = "this kernel is for SM 9.0 alone; use another backend"
        raise BackendError(
            f"NVRTC {version} does not compile {source} for {arch} with {dict(macros)}: {what}. Remedy: {remedy}."
        ) from error
    finally:
        nvrtc.destroyProgram(program)


def _first_error(log: str, files: dict[str, str]) -> str:
    found = _ERROR.search(log)
    if found is None:
        return log.strip()
    lines = files[found["file"]].splitlines() if found["file"] in files else []
    number = int(found["line"])
    quoted = f" in `{lines[number - 1].strip()}`" if 0 < number <= len(lines) else ""
    return f"{found['file']}, line {number}: {found['what']}{quoted}"


@functools.cache
def sources(source: str) -> dict[str, str]:
    """Return the text of a file (in kernels/, or an absolute path) and of all its includes, by name."""
    text = (resources.files(__package__) / "kernels" / source).read_text()
    found = {Path(source).name: text}
    for included in _INCLUDE.findall(text):
        found |= sources(included)
    return found


def _read(file: Path) -> bytes | None:
    """Return the code that `_write` wrote; None if it is missing, incomplete, or may have been written by other
    users."""
    try:
        content = private.read(file)
    except private.Untrusted as error:
        _warn(file.parent, f"kernels kept on disk are not used, but compiled anew: {error.strerror}")
        return None
    except OSError:  # missing; any other cause shows when it is written
        return None
    digest, code = content[:32], content[32:]
    return code if code and hashlib.sha256(code).digest() == digest else None


def _write(file: Path, code: bytes) -> None:
    """Write the code with its hash, atomically. If the folder cannot be written, warn and compile again next time."""
    try:
        private.write(file, hashlib.sha256(code).digest() + code)
    except private.Untrusted as error:
        _warn(file.parent, f"kernels kept on disk are not used, but compiled anew: {error.strerror}")
    except OSError as error:
        _warn(file.parent, f"{file.parent} can't be written, every process compiles its CUDA kernels again: {error.strerror}")


_warned: set[Path] = set()  # folders


def _warn(folder: Path, words: str) -> None:
    """Warn once per process and folder."""
    if folder not in _warned:
        _warned.add(folder)
        warnings.warn(f"nsa-sel: {words}", RuntimeWarning, stacklevel=4)

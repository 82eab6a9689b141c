"""Build nsa-sel as a kernel of Hugging Face `kernels`, in its universal layout: `make hub-kernel`, or python -m nsa_sel.hub.kernel.

`kernels` imports a kernel under a name of its own, so that several versions fit in one process. So the copy imports itself by relative
names, and has its torch.library ops in a namespace that is named after its content. It runs where nsa-sel is not installed, and beside it.

Not in it: the benchmarks and tuning, the command line, the calls of other libraries, several ranks, and the oracle.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import re
from pathlib import Path

HOME = Path(__file__).parents[1]
LAYERS = "hub/layers.py"  # layers.py of the kernel
SOURCES = re.compile(r".*\.(py|cuh?|yaml)")
LEFT_OUT = re.compile(r"(bench|cli|compat|distributed|hub)/.*|__main__\.py|oracle\w*\.py|configs/data_sheets\.yaml")


def build(folder: Path) -> Path:
    """Write the kernel to `folder`.

    Args:
        folder: the kernel's repository, for `kernels.get_local_kernel`; the kernel is in build/torch-universal/ of it, which must be new.

    Returns:
        build/torch-universal/ of `folder`.

    Raises:
        FileExistsError: it exists.
    """
    files = {name: (HOME / name).read_bytes() for name in _names()} | {"layers.py": (HOME / LAYERS).read_bytes()}
    files["__init__.py"] += b"\nfrom nsa_sel import layers as layers  # noqa: E402\n"
    content = repr(sorted(files.items())).encode() + Path(__file__).read_bytes()
    name = f"_nsa_sel_{hashlib.sha256(content).hexdigest()[:10]}"
    variant = folder / "build" / "torch-universal"
    variant.mkdir(parents=True)
    digests = {}
    for path, content in sorted(files.items()):
        if path.endswith(".py"):
            content = relocated(content.decode(), path, name).encode()
        file = variant / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        digests[path] = base64.b64encode(hashlib.sha256(content).digest()).decode()
    metadata = {
        "id": name, "name": "nsa-sel", "version": 0, "license": "Apache-2.0", "backend": {"type": "cuda"}, "python-depends": [],
        "digest": {"algorithm": "sha256", "files": digests},
    }  # fmt: skip
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2))
    return variant


def _names() -> list[str]:
    """The files of the package that the kernel has; links to folders are followed."""
    found = [Path(folder, name).relative_to(HOME).as_posix() for folder, _, names in os.walk(HOME, followlinks=True) for name in names]
    return [name for name in found if SOURCES.fullmatch(name) and not LEFT_OUT.fullmatch(name)]


def relocated(source: str, path: str, name: str) -> str:
    """The source of the module at `path` with relative imports, and with `name` in place of nsa_sel where the module is looked up by its
    name, and as the namespace of torch.library ops."""
    dots = "." * (path.count("/") + 1)
    source = re.sub(
        r"^( *)from nsa_sel(?:\.([\w.]+))? import", lambda m: f"{m[1]}from {dots}{m[2] or ''} import", source, flags=re.MULTILINE
    )
    source = re.sub(r'torch\.ops\.nsa_sel\b|"nsa_sel(?=::|\.[a-z{])', lambda m: m[0].replace("nsa_sel", name), source)
    return re.sub(r'\b(files|Library)\("nsa_sel"', rf'\1("{name}"', source)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m nsa_sel.hub.kernel", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/hub-kernel"), help="the repository, a folder without a build of the kernel")
    print(build(parser.parse_args().out))

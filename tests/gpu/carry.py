"""Packages for a machine without a network: wheels that are downloaded here and unpacked there.

    python -m tests.gpu.carry [FOLDER]

torch, and what is built for it (torchvision), have to be there already.
"""

import argparse
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .stages import ROOT

FOLDER = ROOT / "out" / "gpu-wheels"
MOST_BYTES = 64 << 20  # of the tracked files and the wheels together

CORE = {"anyio": (4, 4), "idna": (2, 8), "msgspec": (0, 19), "typing-extensions": (4, 10)}
TESTS = {"pytest": (8, 2), "pluggy": (1, 5), "iniconfig": (1,), "packaging": (20,), "pygments": ()}
PROGRAMS = {"psutil": (5, 9), "gymnasium": (1,), "farama-notifications": (), "cloudpickle": (1, 2)}
NEEDED: dict[str, tuple[int, ...]] = {**CORE, **TESTS, **PROGRAMS}
"""For each package that is carried, the least version that will do."""

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


# ── here ────────────────────────────────────────────────────────────────────────────────────────


def download(folder: Path) -> None:
    """Download the wheels for each version of Python; pip says what it cannot find."""
    platforms = [word for each in PLATFORMS for word in ("--platform", each)]
    for python in PYTHONS:
        line = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        line += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
        subprocess.run([*line, *platforms, *NEEDED], check=True)


def check(folder: Path, tracked: int) -> str:
    """Return what is carried and its size, beside `tracked` bytes of the working tree.

    Raises:
        ValueError: if it is too much, or a package is missing.
    """
    wheels = [*folder.glob("*.whl")]
    missing = NEEDED.keys() - {name_of(each) for each in wheels}
    if missing:
        raise ValueError(f"{folder} has no wheel of {', '.join(sorted(missing))}")
    size = tracked + sum(each.stat().st_size for each in wheels)
    if size > MOST_BYTES:
        raise ValueError(f"{size:,} bytes are to be carried, and at most {MOST_BYTES:,} can be")
    return f"{len(wheels)} wheels in {folder}, {size / (1 << 20):.1f} MiB with the tracked files"


def tracked_bytes() -> int:
    """Return the size of the tracked files."""
    line = ["git", "ls-files", "-z"]
    names = subprocess.run(line, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sum((ROOT / name).stat().st_size for name in names.split("\0") if name)


# ── there ───────────────────────────────────────────────────────────────────────────────────────


def unpack(folder: Path, into: Path) -> list[str]:
    """Unpack the wheels of what this Python lacks; return the names of what it still lacks.

    What is installed stays in use, since torch there may rely on its version.
    """
    lacking = [name for name in NEEDED if not is_installed(name)]
    found = {name_of(each): each for each in sorted(folder.glob("*.whl")) if fits(each)}
    for name in lacking:
        if name in found:
            with zipfile.ZipFile(found[name]) as wheel:
                wheel.extractall(into)
    return [name for name in lacking if name not in found]


def is_installed(name: str) -> bool:
    try:
        return numbers(version(name)) >= NEEDED[name]
    except PackageNotFoundError:
        return False


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def name_of(wheel: Path) -> str:
    return wheel.name.partition("-")[0].lower().replace("_", "-")


def fits(wheel: Path, python: Iterable[int] = sys.version_info[:2]) -> bool:
    """Return whether this Python can import what is in the wheel."""
    _, _, interpreter, abi, _ = wheel.stem.rsplit("-", 4)
    here = "cp" + "".join(map(str, python))
    return abi in ("none", "abi3") or interpreter == abi == here


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    given = parser.parse_args()
    download(given.folder)
    try:
        print(check(given.folder, tracked_bytes()))
    except ValueError as exc:
        sys.exit(str(exc))

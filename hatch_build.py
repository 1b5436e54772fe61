"""Compile the hot modules with mypyc: into a wheel, or beside their sources.

The modules are listed in pyproject.toml, at this hook. The hook is off by default: a plain
`pip install .` needs no compiler. The sources are part of every wheel, and the same code.
"""

import contextlib
import tempfile
import tomllib
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # `make compiled` needs mypy and setuptools only
    BuildHookInterface = object

ROOT = Path(__file__).parent

# Reading torch takes mypy two minutes, and makes no code faster. Our own modules have to be read:
# the instances of a compiled class with an unknown base end the process.
# (tests/unit/wire/test_frames.py::test_a_length_beyond_the_limit)
MYPY = """\
[mypy]
follow_imports = silent
[mypy-torch.*,anyio.*,msgspec.*]
follow_imports = skip
ignore_missing_imports = true
"""


def listed_modules() -> list[str]:
    """Return the paths of the modules to compile, relative to this folder."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found: list[str] = config["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"][
        "modules"
    ]
    return found


def compile_modules(target: Path, modules: list[str]) -> list[Path]:
    """Compile modules into one shared library and a loader each, below `target`.

    Return the paths. One library has direct calls between the modules.
    """
    import setuptools
    from mypyc.build import mypycify

    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(ROOT):
        config = Path(scratch, "mypy.ini")
        config.write_text(MYPY)
        options = [f"--config-file={config}", f"--cache-dir={scratch}/cache"]
        extensions = mypycify(
            [*options, *modules], target_dir=scratch, group_name="aiorpc_torch", debug_level="0"
        )
        distribution = setuptools.Distribution({"name": "aiorpc_torch", "ext_modules": extensions})
        command: Any = distribution.get_command_obj("build_ext")
        command.build_lib, command.build_temp = str(target), scratch
        command.ensure_finalized()
        command.run()
        return [Path(each) for each in command.get_outputs()]


class CompiledHook(BuildHookInterface):  # type: ignore[misc]
    """The build hook: adds the compiled modules to a wheel, or writes them in place."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the modules: in place for an editable install, else into the wheel."""
        if version == "editable":
            compile_modules(ROOT, self.config["modules"])
            return
        self._scratch = tempfile.TemporaryDirectory()
        target = Path(self._scratch.name)
        found = compile_modules(target, self.config["modules"])
        build_data["pure_python"], build_data["infer_tag"] = False, True
        build_data["force_include"] |= {
            str(path): path.relative_to(target).as_posix() for path in found
        }

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled for the wheel."""
        if version != "editable":
            self._scratch.cleanup()


if __name__ == "__main__":
    compile_modules(ROOT, listed_modules())

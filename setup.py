"""`python setup.py build_ext --inplace` builds the CUTLASS kernels, as `deepwell build`; the rest: pyproject.toml."""

import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Command, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildPackage(build_py):
    """The package with csrc/ inside, so that `deepwell build` works where it is installed."""

    def run(self) -> None:
        super().run()
        if not getattr(self, "editable_mode", False):
            target = Path(self.build_lib) / "deepwell" / "csrc"
            shutil.copytree(ROOT / "csrc", target, dirs_exist_ok=True)


class BuildKernels(Command):
    description = "build the CUTLASS kernels of csrc/ for this machine's GPUs (deepwell build)"
    user_options = [  # noqa: RUF012 - setuptools wants a list
        ("inplace", "i", "accepted; the library is kept in Deepwell's cache folder"),
        ("arch=", None, "architectures to build for, such as sm_90a,sm_100a"),
    ]
    boolean_options = ["inplace"]  # noqa: RUF012

    def initialize_options(self) -> None:
        self.inplace = False
        self.arch = None

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        command = [sys.executable, "-m", "deepwell", "build", *(["--arch", self.arch] if self.arch else [])]
        path = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); sys.argv = {command[2:]!r}; "
        code = path + "import runpy; runpy.run_module('deepwell', run_name='__main__')"
        sys.exit(subprocess.run([sys.executable, "-c", code], check=False).returncode)


setup(cmdclass={"build_ext": BuildKernels, "build_py": BuildPackage})

"""Holds up: the kernels, built with the address and undefined behaviour sanitizers, pass the tests of this folder.

The build stays in build/sanitize, so that only what changed is compiled again. It holds the variants that this CPU
can run.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from k3 import kernels

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "sanitize"
LIBRARIES = ("libasan.so", "libubsan.so")

# What reads and writes at computed places; tests of bindings, forks and cgroup files say nothing new here.
TESTED = ("decode", "expert", "layers", "matmul", "quantize", "rowops")

RUN = """
import importlib.util, sys
import pytest
spec = importlib.util.spec_from_file_location("k3.kernels._kernels", sys.argv[1])
sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
sys.exit(pytest.main(sys.argv[2:]))
"""


def runtime() -> list[str]:
    """Paths of the sanitizers' run-time libraries, or a skip."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None or shutil.which("cmake") is None or shutil.which("ninja") is None:
        pytest.skip("no compiler, cmake and ninja to build the kernels with")
    if importlib.util.find_spec("nanobind") is None:
        pytest.skip("nanobind is not installed, so the kernels cannot be built again")
    paths = []
    for name in LIBRARIES:
        found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        if not Path(found.stdout.strip()).is_absolute():
            pytest.skip(f"{compiler} comes without {name}")
        paths.append(found.stdout.strip())
    return paths


def variants() -> list[str]:
    """What this CPU can run; avx512 has nothing of its own beside avx512vnni and avx2."""
    names = kernels.cpu_variants()
    return [name for name in names if name != "avx512" or "avx512vnni" not in names]


def checked(command: list[str], **options: object) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    assert done.returncode == 0, f"{' '.join(command[:4])} ... failed:\n{done.stdout[-6000:]}"


@pytest.mark.timeout(600)
def test_no_variant_reads_or_writes_astray() -> None:
    libraries = runtime()
    nanobind = subprocess.run(
        [sys.executable, "-m", "nanobind", "--cmake_dir"], capture_output=True, text=True, check=True
    )
    settings = {
        "CMAKE_BUILD_TYPE": "None",
        "K3_SANITIZE": "ON",
        "K3_VARIANTS": ",".join(variants()),
        "nanobind_DIR": nanobind.stdout.strip(),
        "Python_EXECUTABLE": sys.executable,
    }
    checked(
        ["cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(BUILD), *(f"-D{k}={v}" for k, v in settings.items())]
    )
    checked(["cmake", "--build", str(BUILD), "--target", "_kernels", "--parallel", str(kernels.usable_cpus())])
    (module,) = BUILD.glob("_kernels*.so")
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
    }
    tests = [str(Path(__file__).with_name(f"test_{name}.py")) for name in TESTED]
    checked(
        [sys.executable, "-c", RUN, str(module), "-q", "-x", "-p", "no:cacheprovider", *tests],
        env=environment,
        cwd=ROOT,
    )

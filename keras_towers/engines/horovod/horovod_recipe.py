"""The recipe that compiles an unpatched Horovod for a recent TensorFlow.

TensorFlow has moved headers that Horovod includes. ``headers/`` has forwarding
headers in their old places, and names that TensorFlow has dropped.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from keras_towers.jobs.building import recipe, toolchain
from keras_towers.jobs.building.recipe import Recipe, put_first

_PROBE = """
import json
import horovod.tensorflow as hvd
features = dict(
    Gloo=bool(hvd.gloo_built()),
    MPI=bool(hvd.mpi_built()),
    NCCL=hvd.nccl_built(),
)
print(json.dumps(features))
"""
# Instruction sets that Horovod compiles for if the CPU has them.
_CPU_FLAGS = ("f16c", "avx", "fma")
_HEADERS = Path(__file__).with_name("headers")
# Folders in TensorFlow's wheel with headers that its public headers include.
_EXTRA_INCLUDES = ("external/highwayhash", "external/farmhash_archive/src")


@dataclass(frozen=True)
class Horovod(Recipe):
    """Horovod for TensorFlow only, with Gloo, maybe with MPI and NCCL."""

    with_mpi: bool = False
    with_nccl: bool = False

    prefix = "HOROVOD"
    name = "horovod"
    title = "Horovod"
    purpose = "For several processes or machines"
    without_nccl = "sums in CPU memory; to sum on the GPUs"
    version = "0.28.1"
    sha256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
    revision = 1
    build_variables = (
        "CXXFLAGS",
        "MPI_HOME",
        "HOROVOD_ALLOW_MIXED_GPU_IMPL",
        "HOROVOD_BUILD_ARCH_FLAGS",
        "HOROVOD_BUILD_CUDA_CC_LIST",
        "HOROVOD_CPU_OPERATIONS",
        "HOROVOD_CUDA_HOME",
        "HOROVOD_NCCL_HOME",
        "HOROVOD_NCCL_INCLUDE",
        "HOROVOD_NCCL_LIB",
        "HOROVOD_NCCL_LINK",
    )
    overruled = ("HOROVOD_WITH", "HOROVOD_GPU", "HOROVOD_SKIP_COMPILE")
    # Known to work with its setup.py, which dates from 2023.
    build_tools = (
        "setuptools>=70,<85",
        "wheel>=0.43,<1",
        "packaging>=23,<27",
        "cmake>=3.13,<5",
    )
    # From the install_requires of its setup.py.
    runtime = ("cloudpickle", "psutil", "pyyaml", "packaging")
    probe = _PROBE

    def libraries(self) -> list[toolchain.Tool]:
        tools = [toolchain.find_mpi()] if self.with_mpi else []
        if self.with_nccl:
            find = toolchain.find_nvcc, toolchain.find_nccl
            tools += [of_name(self.prefix) for of_name in find]
        return tools

    def packages(self) -> tuple[str, ...]:
        packaged = self.with_nccl and not toolchain.find_nvcc(self.prefix).path
        return self.build_tools + (toolchain.CUDA_PACKAGES if packaged else ())

    def processor(self) -> str:
        return " ".join(f"-m{flag}" for flag in recipe.cpu_flags(_CPU_FLAGS))

    def environment(
        self, variables: dict[str, str], folder: Path, tools: Path
    ) -> dict[str, str]:
        mpi = "HOROVOD_WITH_MPI" if self.with_mpi else "HOROVOD_WITHOUT_MPI"
        variables.update(
            {
                "CMAKE_GENERATOR": "Unix Makefiles",
                # CMake 4 rejects the minimum version that its Gloo declares.
                "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
                "HOROVOD_CMAKE": str(tools / "bin" / "cmake"),
                "HOROVOD_WITH_GLOO": "1",
                mpi: "1",
            }
        )
        if flags := self.processor():
            # The same flags as in the cache key, whatever the compiler.
            variables.setdefault("HOROVOD_BUILD_ARCH_FLAGS", flags)
        headers = recipe.tensorflow_folder() / "include"
        extra = [str(headers / name) for name in _EXTRA_INCLUDES]
        includes = [str(_HEADERS / "moved"), *extra]
        put_first(variables, "CPLUS_INCLUDE_PATH", includes)
        if self.with_nccl:
            self._add_nccl(variables, folder, tools)
        return variables

    def _add_nccl(
        self, variables: dict[str, str], folder: Path, tools: Path
    ) -> None:
        variables["HOROVOD_GPU_OPERATIONS"] = "NCCL"
        flags = variables.get("CXXFLAGS", "")
        # The path of this package may have spaces.
        stream = shutil.copy(_HEADERS / "stream.h", folder)
        variables["CXXFLAGS"] = f"{flags} -include {stream}".strip()
        nvcc = toolchain.find_nvcc(self.prefix)
        cuda = toolchain.cuda_home(nvcc, tools)
        variables.setdefault("HOROVOD_CUDA_HOME", str(cuda))
        if not nvcc.path:
            # A toolkit has its libraries in lib64, and this one without a
            # version in its name, for which CMake asks.
            variables["HOROVOD_CUDA_HOME"] = str(cuda)
            links = folder / "cuda"
            links.mkdir()
            (links / "libcudart.so").symlink_to(cuda / "lib/libcudart.so.13")
            put_first(variables, "LIBRARY_PATH", [str(cuda / "lib")])
            put_first(variables, "CMAKE_LIBRARY_PATH", [str(links)])
        path = toolchain.find_nccl(self.prefix).path or ""
        home, flags = toolchain.linkable("nccl", path, folder / "nccl")
        if home == path:
            variables.setdefault("HOROVOD_NCCL_HOME", home)
            return
        variables.update(
            HOROVOD_NCCL_INCLUDE=f"{home}/include",
            HOROVOD_NCCL_LIB=f"{home}/lib",
            HOROVOD_NCCL_LINK="shared",
            LDFLAGS=f"{variables.get('LDFLAGS', '')} {flags}".strip(),
        )

    def built_for(self, package: metadata.Distribution) -> str | None:
        try:
            path = Path(str(package.locate_file("horovod/metadata.json")))
            return json.loads(path.read_text()).get("tensorflow")
        except (OSError, ValueError):
            return None

"""How an unpatched Horovod is compiled against a TensorFlow of today.

TensorFlow 2.16 and newer moved a header that Horovod includes, and hides two
more in folders of their own. The compiler is told where they are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import ClassVar

from keras_towers.building import target, toolchain
from keras_towers.building.build_log import Hints
from keras_towers.building.recipe import Recipe

VARIABLES = "HOROVOD"
"""How the names of its environment variables begin."""
# Counts up when the way of building changes, so that old wheels are left.
_RECIPE = 1
# Known to work together with Horovod's setup.py, which is of 2023.
_BUILD_TOOLS = ("setuptools>=70,<85", "wheel>=0.43,<1", "packaging>=23,<27")
_CMAKE = "cmake>=3.13,<5"
_PROBE = """
import json
import horovod.tensorflow as hvd
parts = dict(
    Gloo=bool(hvd.gloo_built()),
    MPI=bool(hvd.mpi_built()),
    NCCL=hvd.nccl_built(),
)
print(json.dumps(parts))
"""
# What of the user's environment changes what is built.
_BUILD_VARIABLES = (
    "CXX",
    "CXXFLAGS",
    "CPPFLAGS",
    "LDFLAGS",
    "CPATH",
    "CPLUS_INCLUDE_PATH",
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
# Settings of Horovod that would contradict what is asked for here.
_OVERRULED = ("HOROVOD_WITH", "HOROVOD_GPU", "HOROVOD_SKIP_COMPILE")
# The instruction sets that Horovod compiles for where the CPU has them.
_CPU_FLAGS = ("f16c", "avx", "fma")
_MOVED_HEADER = (
    "tensorflow/compiler/xla/client/xla_builder.h",
    "xla/hlo/builder/xla_builder.h",
)
# What Horovod's code for GPUs calls by a name that is gone from there.
_FORWARDING = """\
#include "absl/status/statusor.h"
#include "{new}"
#if HAVE_GPU
namespace xla {{
using absl::StatusOr;
}}
#endif
"""
# Where TensorFlow's wheel has headers that its own headers include.
_EXTRA_INCLUDES = ("external/highwayhash", "external/farmhash_archive/src")


@dataclass(frozen=True)
class Horovod(Recipe):
    """Horovod for TensorFlow only, with Gloo.

    Attributes:
        with_mpi: build MPI in, beside Gloo.
        with_nccl: build NCCL in, for GPUs.
    """

    with_mpi: bool = False
    with_nccl: bool = False

    name: ClassVar[str] = "horovod"
    title: ClassVar[str] = "Horovod"
    version: ClassVar[str] = "0.28.1"
    sha256: ClassVar[str] = (
        "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
    )
    # From the install_requires of its setup.py.
    runtime: ClassVar[tuple[str, ...]] = (
        "cloudpickle",
        "psutil",
        "pyyaml",
        "packaging",
    )
    probe: ClassVar[str] = _PROBE
    hints: ClassVar[Hints] = (
        (
            r"nccl\.h|Could NOT find NCCL",
            "NCCL is missing: install it (Debian and Ubuntu: libnccl-dev from "
            "NVIDIA's repository) or name its folder in HOROVOD_NCCL_HOME, or "
            "build without --with-nccl.",
        ),
        (
            r"unsupported GNU version|unsupported Microsoft|unsupported clang",
            "This CUDA does not know so new a compiler: name an older one in "
            "CXX.",
        ),
        (
            r"Failed to find nvcc|CUDAToolkit|CMAKE_CUDA_COMPILER",
            "CUDA's toolkit is missing or unfit: name its folder in "
            "HOROVOD_CUDA_HOME, or build without --with-nccl.",
        ),
        (
            r"tensorflow/\S+: No such file|xla/\S+: No such file",
            "This TensorFlow lacks a header that Horovod needs: the build is "
            "known to work with TensorFlow 2.20 and 2.21.",
        ),
    )

    def tools(self) -> list[toolchain.Tool]:
        tools = [toolchain.find_compiler(), toolchain.find_make()]
        if self.with_mpi:
            tools.append(toolchain.find_mpi())
        if self.with_nccl:
            tools.append(toolchain.find_nvcc(VARIABLES))
            tools.append(toolchain.find_nccl(VARIABLES))
        return tools

    def build_tools(self) -> list[str]:
        own_cmake = toolchain.find_cmake(VARIABLES).path
        return [*_BUILD_TOOLS, *([] if own_cmake else [_CMAKE])]

    def key(self) -> dict[str, str]:
        mpi = nccl = ""
        if self.with_mpi:
            tool = toolchain.find_mpi()
            # Implementations are not compatible with one another.
            flags = toolchain.first_line([tool.path or "mpicxx", "-show"])
            mpi = f"{tool.version} {flags}"
        if self.with_nccl:
            found = toolchain.find_nccl(VARIABLES)
            nvcc = toolchain.find_nvcc(VARIABLES).version
            nccl = f"{found.path} {found.version}, nvcc {nvcc}"
        chosen = {
            name: os.environ[name]
            for name in _BUILD_VARIABLES
            if name in os.environ
        }
        return {
            "recipe": str(_RECIPE),
            self.name: self.version,
            "cpu_flags": " ".join(target.cpu_flags(_CPU_FLAGS)),
            "with_mpi": f"{self.with_mpi} {mpi}".strip(),
            "with_nccl": f"{self.with_nccl} {nccl}".strip(),
            "environment": json.dumps(chosen, sort_keys=True),
        }

    def environment(
        self, variables: Mapping[str, str], folder: Path, tools: Path
    ) -> dict[str, str]:
        result = {
            name: value
            for name, value in variables.items()
            if not name.startswith(_OVERRULED)
        }
        cmake = toolchain.find_cmake(VARIABLES).path
        mpi = "HOROVOD_WITH_MPI" if self.with_mpi else "HOROVOD_WITHOUT_MPI"
        result.update(
            {
                "CMAKE_GENERATOR": "Unix Makefiles",
                # CMake 4 refuses the minimum version that its Gloo states.
                "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
                "HOROVOD_CMAKE": cmake or str(tools / "bin" / "cmake"),
                "HOROVOD_WITH_TENSORFLOW": "1",
                "HOROVOD_WITHOUT_PYTORCH": "1",
                "HOROVOD_WITHOUT_MXNET": "1",
                "HOROVOD_WITH_GLOO": "1",
                mpi: "1",
            }
        )
        flags = " ".join(f"-m{flag}" for flag in target.cpu_flags(_CPU_FLAGS))
        if flags:
            # The flags that the cache knows of, whichever gcc is asked.
            result.setdefault("HOROVOD_BUILD_ARCH_FLAGS", flags)
        includes = _includes(folder / "include")
        if result.get("CPLUS_INCLUDE_PATH"):
            includes.append(result["CPLUS_INCLUDE_PATH"])
        if includes:
            result["CPLUS_INCLUDE_PATH"] = os.pathsep.join(includes)
        if self.with_nccl:
            _add_nccl(result, folder)
        return result

    def built_for(self, package: metadata.Distribution) -> str | None:
        try:
            path = Path(str(package.locate_file("horovod/metadata.json")))
            return json.loads(path.read_text()).get("tensorflow")
        except (OSError, ValueError):
            return None


def _includes(folder: Path) -> list[str]:
    """Folders where the compiler finds what this TensorFlow has elsewhere."""
    headers = target.tensorflow_folder() / "include"
    includes = [
        str(headers / name)
        for name in _EXTRA_INCLUDES
        if (headers / name).is_dir()
    ]
    old, new = _MOVED_HEADER
    if not (headers / old).is_file() and (headers / new).is_file():
        forwarding = folder / old
        forwarding.parent.mkdir(parents=True)
        forwarding.write_text(_FORWARDING.format(new=new))
        includes.insert(0, str(folder))
    return includes


def _add_nccl(variables: dict[str, str], folder: Path) -> None:
    variables["HOROVOD_GPU_OPERATIONS"] = "NCCL"
    nvcc = toolchain.find_nvcc(VARIABLES).path or ""
    variables.setdefault("HOROVOD_CUDA_HOME", str(Path(nvcc).parent.parent))
    home = toolchain.find_nccl(VARIABLES).path or ""
    if not toolchain.is_pip_nccl(home):
        variables.setdefault("HOROVOD_NCCL_HOME", home)
        return
    # pip's NCCL lacks the name that linkers look for, and the folder is not
    # one that the loader searches: say where it is from where Horovod is.
    library = folder / "nccl"
    library.mkdir()
    (library / "libnccl.so").symlink_to(Path(home) / "lib" / "libnccl.so.2")
    variables.update(
        HOROVOD_NCCL_INCLUDE=f"{home}/include",
        HOROVOD_NCCL_LIB=str(library),
        HOROVOD_NCCL_LINK="shared",
    )
    rpath = "-Wl,-rpath,$ORIGIN/../../nvidia/nccl/lib"
    flags = variables.get("LDFLAGS", "")
    variables["LDFLAGS"] = f"{flags} {rpath}".strip()

"""How an unpatched BytePS is compiled against a recent TensorFlow.

BytePS 0.2.5 dates from 2021 and takes a GPU for granted. The compiler finds
what is missing in ``byteps_headers``: names that TensorFlow has dropped, and on
a machine without a GPU the parts of CUDA and NCCL that BytePS calls.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from keras_towers.building import target, toolchain
from keras_towers.building.build_log import Hints
from keras_towers.building.recipe import Recipe
from keras_towers.errors import TowerError

VARIABLES = "BYTEPS"
"""The prefix of its environment variables."""
# Increment when the build changes, so that old wheels are not used.
_RECIPE = 1
_HEADERS = Path(__file__).with_name("byteps_headers")
_PATIENCE = _HEADERS / "always" / "patience.h"
_BUILD_TOOLS = ("setuptools>=70,<81", "wheel>=0.43,<1")
# BytePS imports it by its old name, which Python 3.12 has no longer.
_RUNTIME = ("setuptools",)
_PROBE = """
import json
import byteps.tensorflow
from keras_towers.building.byteps import has_cuda
cuda = has_cuda()
print(json.dumps({"NCCL": cuda, "stand-ins for CUDA": not cuda}))
"""
# Environment variables of the user that affect the build.
_BUILD_VARIABLES = (
    "CC",
    "CXX",
    "CFLAGS",
    "CPPFLAGS",
    "LDFLAGS",
    "CPATH",
    "CPLUS_INCLUDE_PATH",
    "BYTEPS_CUDA_HOME",
    "BYTEPS_NCCL_HOME",
)
# Settings of BytePS that would contradict the options given here.
_OVERRULED = ("BYTEPS_WITH", "BYTEPS_USE_MPI", "BYTEPS_NCCL_LINK")
# Its loops read numbers through pointers of other types.
_FLAGS = "-fno-strict-aliasing -w"
# Libraries that it is linked to, and that are headers only here.
_EMPTY_ARCHIVE = b"!<arch>\n"


@dataclass(frozen=True)
class BytePS(Recipe):
    """BytePS for TensorFlow only.

    Attributes:
        with_nccl: build with CUDA and NCCL, for GPUs.
    """

    with_nccl: bool = False

    name: ClassVar[str] = "byteps"
    title: ClassVar[str] = "BytePS"
    version: ClassVar[str] = "0.2.5.post15"
    sha256: ClassVar[str] = (
        "9d6a3c5be4c4b5a172739744bb32725c433f9a9f63794e1885e7376ff4eea99f"
    )
    runtime: ClassVar[tuple[str, ...]] = _RUNTIME
    probe: ClassVar[str] = _PROBE
    hints: ClassVar[Hints] = (
        (
            r"nccl\.h|-lnccl",
            "NCCL is missing: install it (Debian and Ubuntu: libnccl-dev from "
            "NVIDIA's repository), set BYTEPS_NCCL_HOME to its folder, or "
            "build without --with-nccl.",
        ),
        (
            r"cuda_runtime|-lcudart|CUDA library was not found",
            "The CUDA toolkit is missing or unusable: set BYTEPS_CUDA_HOME to "
            "its folder, or build without --with-nccl.",
        ),
        (
            r"rdma|ibverbs",
            "Headers of RDMA are installed, but not its libraries: install "
            "them (Debian and Ubuntu: librdmacm-dev), or remove the headers.",
        ),
        (
            r"tensorflow/\S+: No such file|xla/\S+: No such file"
            r"|stream_executor",
            "This TensorFlow lacks a header or a name that BytePS needs: the "
            "build is known to work with TensorFlow 2.20 and 2.21.",
        ),
    )

    def tools(self) -> list[toolchain.Tool]:
        tools = [_processor(), toolchain.find_compiler(), toolchain.find_make()]
        if self.with_nccl:
            tools.append(toolchain.find_nvcc(VARIABLES))
            tools.append(toolchain.find_nccl(VARIABLES))
        return tools

    def build_tools(self) -> list[str]:
        return list(_BUILD_TOOLS)

    def key(self) -> dict[str, str]:
        nccl = ""
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
            # It is compiled for this processor, and may not run on others.
            "cpu": target.cpu_type(),
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
        stand_ins = folder / "stand-ins"
        # "." is the root of the sources, which a header here refers to.
        includes = [".", str(_HEADERS / "always")]
        archives = ["numa"]
        if not self.with_nccl:
            includes.append(str(_HEADERS / "host"))
            archives += ["cudart", "nccl_static"]
        for name in archives:
            _empty_library(stand_ins / "lib", name)
        if result.get("CPLUS_INCLUDE_PATH"):
            includes.append(result["CPLUS_INCLUDE_PATH"])
        result.update(
            {
                "BYTEPS_WITH_TENSORFLOW": "1",
                "BYTEPS_WITHOUT_PYTORCH": "1",
                "BYTEPS_WITHOUT_MXNET": "1",
                # Else its setup.py starts as many compilers as there are files.
                "CI": "1",
                # Its Makefile would download ZeroMQ, which comes with it.
                "WGET": "cp -t .",
                "ZMQ_URL": "../../zeromq-4.1.4.tar.gz",
                # Of its network layer, for which there are no other flags.
                "CXX": f"{result['CXX']} -include {_PATIENCE}",
                "CPLUS_INCLUDE_PATH": os.pathsep.join(includes),
                "CFLAGS": f"{result.get('CFLAGS', '')} {_FLAGS}".strip(),
                "LIBRARY_PATH": _joined(
                    str(stand_ins / "lib"), result.get("LIBRARY_PATH")
                ),
            }
        )
        if self.with_nccl:
            _add_nccl(result, folder)
        else:
            result["BYTEPS_CUDA_HOME"] = str(stand_ins)
            result["BYTEPS_NCCL_HOME"] = str(stand_ins)
        return result


def has_cuda() -> bool:
    """Whether the installed BytePS was built for GPUs; does not load it.

    Raises:
        TowerError: it is not installed.
    """
    spec = importlib.util.find_spec("byteps")
    if spec is None or not spec.submodule_search_locations:
        raise TowerError(
            "BytePS is not installed in this environment: run `keras-towers "
            "install byteps`."
        )
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    folder = Path(list(spec.submodule_search_locations)[0])
    library = (folder / "tensorflow" / f"c_lib{suffix}").read_bytes()
    return b"libcudart.so" in library


def _processor() -> toolchain.Tool:
    """A processor of the kind that its sources are written for."""
    name, machine = "x86-64 processor", platform.machine()
    if machine in ("x86_64", "AMD64"):
        return toolchain.Tool(name, machine)
    return toolchain.Tool(
        name,
        None,
        problem=f"BytePS is written for x86-64 processors, and this is "
        f"{machine}: use Horovod (keras-towers install horovod)",
    )


def _empty_library(folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"lib{name}.a").write_bytes(_EMPTY_ARCHIVE)


def _joined(first: str, others: str | None) -> str:
    return f"{first}{os.pathsep}{others}" if others else first


def _add_nccl(variables: dict[str, str], folder: Path) -> None:
    nvcc = toolchain.find_nvcc(VARIABLES).path or ""
    cuda = variables.setdefault("BYTEPS_CUDA_HOME", str(Path(nvcc).parents[1]))
    variables["BYTEPS_NCCL_LINK"] = "SHARED"
    home = toolchain.find_nccl(VARIABLES).path or ""
    places = [f"{cuda}/lib64"]
    if toolchain.is_pip_nccl(home):
        # pip's NCCL lacks the file name that linkers look for, and no loader
        # looks into its folder: use a path relative to BytePS's.
        library = folder / "nccl" / "lib"
        library.mkdir(parents=True)
        (library / "libnccl.so").symlink_to(f"{home}/lib/libnccl.so.2")
        (library.parent / "include").symlink_to(f"{home}/include")
        home = str(library.parent)
        places.insert(0, "$ORIGIN/../../nvidia/nccl/lib")
    variables["BYTEPS_NCCL_HOME"] = home
    rpath = ",".join(("-Wl", *(f"-rpath,{place}" for place in places)))
    variables["LDFLAGS"] = f"{variables.get('LDFLAGS', '')} {rpath}".strip()

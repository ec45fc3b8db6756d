"""The recipe that compiles an unpatched BytePS for a recent TensorFlow.

BytePS 0.2.5 takes a GPU for granted. ``headers/`` has replacements for names
that TensorFlow has dropped, and for the parts of CUDA and NCCL that it calls.
"""

from __future__ import annotations

import importlib.resources
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from keras_towers.jobs.building import recipe, toolchain
from keras_towers.jobs.building.recipe import Recipe, put_first
from keras_towers.jobs.known_engines import BYTEPS

_HEADERS = Path(__file__).with_name("headers")
_PATIENCE = _HEADERS / "always" / "patience.h"
_PROBE = """
import json
import byteps.tensorflow
from keras_towers.engines.byteps.byteps_recipe import has_cuda
cuda = has_cuda()
print(json.dumps({"NCCL": cuda, "stand-ins for CUDA": not cuda}))
"""
# BytePS reads numbers through pointers of other types, and uses a header that
# NVIDIA's headers used to include.
_FLAGS = "-fno-strict-aliasing -w -include memory"
# CUDA's C++ library in TensorFlow's folder, which CUDA's own headers need.
_CUDA_CXX = "include/third_party/gpus/cuda/libcudacxx/include"
# For libraries that it links to, of which only headers are needed.
_EMPTY_ARCHIVE = b"!<arch>\n"


@dataclass(frozen=True)
class BytePS(Recipe):
    """BytePS for TensorFlow only, maybe with CUDA and NCCL for GPUs."""

    with_nccl: bool = False

    prefix = "BYTEPS"
    name = "byteps"
    title = "BytePS"
    purpose = "To sum gradients on servers"
    without_nccl = "copies gradients to CPU memory; to send from GPUs"
    for_one_cpu = True
    version = "0.2.5.post15"
    sha256 = "9d6a3c5be4c4b5a172739744bb32725c433f9a9f63794e1885e7376ff4eea99f"
    revision = 2
    build_variables = ("CC", "CFLAGS", "BYTEPS_CUDA_HOME", "BYTEPS_NCCL_HOME")
    overruled = ("BYTEPS_WITH", "BYTEPS_USE_MPI", "BYTEPS_NCCL_LINK")
    build_tools = ("setuptools>=70,<81", "wheel>=0.43,<1")
    # BytePS imports distutils, which Python 3.12 has removed.
    runtime = ("setuptools",)
    probe = _PROBE

    def libraries(self) -> list[toolchain.Tool]:
        if not self.with_nccl:
            return []
        find = toolchain.find_cuda_runtime, toolchain.find_nccl
        return [of_name(self.prefix) for of_name in find]

    def tools(self) -> list[toolchain.Tool]:
        machine = platform.machine()
        known = machine if machine == "x86_64" else None
        problem = (
            "BytePS is written for x86-64 processors, and this is "
            f"{machine}: use Horovod (keras-towers install horovod)"
        )
        processor = toolchain.Tool("x86-64 processor", known, problem=problem)
        return [processor, *super().tools()]

    def processor(self) -> str:
        # The build uses all instructions of this processor.
        return recipe.cpu_type()

    def environment(
        self, variables: dict[str, str], folder: Path, tools: Path
    ) -> dict[str, str]:
        stand_ins = folder / "stand-ins"
        (stand_ins / "lib").mkdir(parents=True)
        # A header here includes files by paths from ".", the sources' root.
        includes = [".", str(_HEADERS / "always")]
        archives = ["numa"]
        flags = [variables.pop("LDFLAGS", "")]
        if self.with_nccl:
            cuda, cuda_flags = toolchain.linkable(
                "cuda_runtime",
                toolchain.find_cuda_runtime(self.prefix).path or "",
                folder / "cuda",
            )
            nccl, nccl_flags = toolchain.linkable(
                "nccl",
                toolchain.find_nccl(self.prefix).path or "",
                folder / "nccl",
            )
            flags += [nccl_flags, cuda_flags or f"-Wl,-rpath,{cuda}/lib64"]
            variables["BYTEPS_NCCL_LINK"] = "SHARED"
            includes.append(str(recipe.tensorflow_folder() / _CUDA_CXX))
            if compiler := toolchain.of_pip("cuda_nvcc"):
                # Its package has headers of the runtime.
                includes.append(f"{compiler}/include")
        else:
            cuda = nccl = str(stand_ins)
            includes.append(str(_HEADERS / "host"))
            archives += ["cudart", "nccl_static"]
        for name in archives:
            archive = stand_ins / "lib" / f"lib{name}.a"
            archive.write_bytes(_EMPTY_ARCHIVE)
        put_first(variables, "CPLUS_INCLUDE_PATH", includes)
        put_first(variables, "LIBRARY_PATH", [str(stand_ins / "lib")])
        _add_to_linker(variables, " ".join(filter(None, flags)))
        variables.update(
            {
                "BYTEPS_CUDA_HOME": cuda,
                "BYTEPS_NCCL_HOME": nccl,
                # Otherwise its setup.py starts a compiler for each file.
                "CI": "1",
                # Its Makefile would download ZeroMQ, which the sources contain.
                "WGET": "cp -t .",
                "ZMQ_URL": "../../zeromq-4.1.4.tar.gz",
                # Flags in any other variable do not reach all files.
                "CXX": f"{variables['CXX']} {_FLAGS} -include {_PATIENCE}",
            }
        )
        return variables


def has_cuda() -> bool:
    """Whether the installed BytePS was built for GPUs, without loading it."""
    BYTEPS.check_installed()
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    library = importlib.resources.files("byteps") / f"tensorflow/c_lib{suffix}"
    return b"libcudart.so" in library.read_bytes()


def _add_to_linker(variables: dict[str, str], flags: str) -> None:
    """Pass flags to the linker of the extensions, but not as LDFLAGS.

    BytePS's Makefile sets LDFLAGS to libraries that do not exist yet when
    ZeroMQ is configured, and make would export the variable.
    """
    if not flags:
        return
    for name in ("LDSHARED", "LDCXXSHARED"):
        linker = variables.get(name) or sysconfig.get_config_var(name)
        variables[name] = f"{linker} {flags}"

"""How an unpatched Horovod is compiled against a TensorFlow of today.

TensorFlow 2.16 and newer moved a header that Horovod includes, and hides two
more in folders of their own. The compiler is told where they are.
"""

from __future__ import annotations

import os
from pathlib import Path

from keras_towers.engines import toolchain, wheel_cache

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
# Settings of Horovod that would contradict what is asked for here.
_OVERRULED = ("HOROVOD_WITH", "HOROVOD_GPU", "HOROVOD_SKIP_COMPILE")


def environment(
    folder: Path, with_mpi: bool, with_nccl: bool
) -> dict[str, str]:
    """The environment of the build: the user's, with what is decided here.

    Args:
        folder: an empty one, for what the build needs beside the source.
        with_mpi: build MPI in, beside Gloo.
        with_nccl: build NCCL in, for GPUs.
    """
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OVERRULED)
    }
    temporary = folder / "tmp"
    temporary.mkdir()
    variables.update(
        PATH=toolchain.search_path(),
        # What pip leaves when it is stopped goes away with the folder.
        TMPDIR=str(temporary),
        PYTHONUNBUFFERED="1",
        TF_CPP_MIN_LOG_LEVEL="3",
        CXX=toolchain.find_compiler().path or "",
        CMAKE_GENERATOR="Unix Makefiles",
        # CMake 4 refuses the minimum version that Horovod's Gloo states.
        CMAKE_POLICY_VERSION_MINIMUM="3.5",
        HOROVOD_WITH_TENSORFLOW="1",
        HOROVOD_WITHOUT_PYTORCH="1",
        HOROVOD_WITHOUT_MXNET="1",
        HOROVOD_WITH_GLOO="1",
        **{"HOROVOD_WITH_MPI" if with_mpi else "HOROVOD_WITHOUT_MPI": "1"},
    )
    if "MAKELEVEL" in variables:
        # Run by a make: its flags are about its own jobs, not the user's wish.
        for name in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS"):
            variables.pop(name, None)
    # Horovod's own -j8 can take more memory than there is.
    variables.setdefault("MAKEFLAGS", f"-j{toolchain.jobs()}")
    flags = " ".join(f"-m{flag}" for flag in wheel_cache.cpu_flags())
    if flags:
        # The flags that the cache knows of, whichever gcc is asked.
        variables.setdefault("HOROVOD_BUILD_ARCH_FLAGS", flags)
    includes = _includes(folder / "include")
    if variables.get("CPLUS_INCLUDE_PATH"):
        includes.append(variables["CPLUS_INCLUDE_PATH"])
    if includes:
        variables["CPLUS_INCLUDE_PATH"] = os.pathsep.join(includes)
    if with_nccl:
        _add_nccl(variables, folder)
    return variables


def _includes(folder: Path) -> list[str]:
    """Folders where the compiler finds what this TensorFlow has elsewhere."""
    headers = wheel_cache.tensorflow_folder() / "include"
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
    nvcc = toolchain.find_nvcc().path or ""
    variables.setdefault("HOROVOD_CUDA_HOME", str(Path(nvcc).parent.parent))
    home = toolchain.find_nccl().path or ""
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

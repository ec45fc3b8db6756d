"""What the build of BytePS is told, without a build."""

import os
from pathlib import Path

import pytest

from keras_towers.building import byteps, target, toolchain
from keras_towers.building.build import environment
from keras_towers.building.byteps import BytePS
from keras_towers.building.wheel_cache import Shelf


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_TOWERS_CACHE", str(tmp_path / "cache"))
    for name in ("CPLUS_INCLUDE_PATH", "CFLAGS", "LDFLAGS"):
        monkeypatch.delenv(name, raising=False)


def headers(variables):
    """The folders in which the compiler looks first, from the sources."""
    return variables["CPLUS_INCLUDE_PATH"].split(os.pathsep)


def test_a_machine_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("BYTEPS_WITHOUT_TENSORFLOW", "1")
    monkeypatch.setenv("CFLAGS", "-g")
    variables = environment(BytePS(), tmp_path)
    assert "BYTEPS_WITHOUT_TENSORFLOW" not in variables
    root, *folders = headers(variables)
    assert root == "."
    found = {h.name for folder in folders for h in Path(folder).rglob("*.h")}
    assert {"cuda_runtime.h", "nccl.h", "numa.h", "stream.h"} <= found
    libraries = Path(variables["BYTEPS_CUDA_HOME"]) / "lib"
    assert {"libcudart.a", "libnccl_static.a", "libnuma.a"} == {
        library.name for library in libraries.iterdir()
    }
    assert variables["CFLAGS"] == "-g"
    # Flags for C do not reach files of C++.
    assert " -fno-strict-aliasing " in variables["CXX"]


def test_a_machine_with_gpus(tmp_path, pip_packages):
    variables = environment(BytePS(with_nccl=True), tmp_path)
    found = {
        header.name
        for folder in headers(variables)[1:]
        for header in Path(folder).rglob("*.h")
    }
    assert {"numa.h", "host_config.h"} <= found
    # communicator.h needs it, and NVIDIA's headers do not bring it in.
    assert " -include memory " in variables["CXX"]
    assert not {"cuda_runtime.h", "nccl.h"} & found
    for engine, library in (("CUDA", "libcudart.so"), ("NCCL", "libnccl.so")):
        home = Path(variables[f"BYTEPS_{engine}_HOME"])
        assert (home / "include").is_dir()
        assert (home / "lib" / library).is_file()
    for linker in (variables["LDSHARED"], variables["LDCXXSHARED"]):
        assert linker.endswith(
            " -Wl,-rpath,$ORIGIN/../../nvidia/nccl/lib"
            ",-rpath,$ORIGIN/../../nvidia/cuda_runtime/lib"
        )


def test_a_linkers_flags_do_not_reach_the_makefile(tmp_path, monkeypatch):
    """It has a variable of that name, which make would pass on instead."""
    monkeypatch.setenv("LDFLAGS", "-L/mine")
    variables = environment(BytePS(), tmp_path)
    assert "LDFLAGS" not in variables
    assert variables["LDCXXSHARED"].endswith(" -L/mine")


@pytest.mark.parametrize("change", ["gpu", "cpu", "CXX"])
def test_another_wheel_for_every(change, monkeypatch):
    before = Shelf(BytePS()).path
    if change == "CXX":
        monkeypatch.setenv("CXX", "another")
    if change == "cpu":
        monkeypatch.setattr(target, "cpu_type", lambda: "another")
    assert Shelf(BytePS(with_nccl=change == "gpu")).path != before


def test_the_type_of_the_cpu(monkeypatch):
    cpu = "processor\t: 0\nvendor_id\t: A\nmodel\t\t: 1\nflags\t\t: {}\n\n"
    types = []
    for flags in ("avx sse", "sse avx", "avx avx2 sse"):
        text = cpu.format(flags) * 2
        monkeypatch.setattr(Path, "read_text", lambda path, text=text: text)
        types.append(target.cpu_type())
    assert types[0] == types[1] != types[2]


def test_other_processors_are_refused(monkeypatch):
    monkeypatch.setattr(byteps.platform, "machine", lambda: "aarch64")
    (problem, *_) = toolchain.problems(BytePS().tools())
    assert "x86-64" in problem and "aarch64" in problem

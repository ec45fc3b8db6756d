"""The recipes of engines, without a build."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from keras_towers.engines.byteps.byteps_recipe import BytePS
from keras_towers.engines.horovod.horovod_recipe import Horovod
from keras_towers.jobs.building import recipe, toolchain
from keras_towers.jobs.building.build import build_environment


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch):
    for name in ("CPLUS_INCLUDE_PATH", "CFLAGS", "LDFLAGS"):
        monkeypatch.delenv(name, raising=False)


def headers(variables):
    """What the compiler finds first, behind the sources themselves."""
    root, *folders = variables["CPLUS_INCLUDE_PATH"].split(os.pathsep)
    assert root == "."
    return {h.name for folder in folders for h in Path(folder).rglob("*.h")}


def test_byteps_on_a_machine_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("BYTEPS_WITHOUT_TENSORFLOW", "1")
    monkeypatch.setenv("CFLAGS", "-g")
    monkeypatch.setenv("LDFLAGS", "-L/mine")
    variables = build_environment(BytePS(), tmp_path)
    assert "BYTEPS_WITHOUT_TENSORFLOW" not in variables
    assert {"cuda_runtime.h", "nccl.h", "numa.h", "stream.h"} <= headers(
        variables
    )
    libraries = Path(variables["BYTEPS_CUDA_HOME"]) / "lib"
    assert {"libcudart.a", "libnccl_static.a", "libnuma.a"} == {
        library.name for library in libraries.iterdir()
    }
    assert variables["CFLAGS"] == "-g"
    # Flags for C do not reach files of C++.
    assert " -fno-strict-aliasing " in variables["CXX"]
    # The Makefile has a variable of that name, which make would pass on.
    assert "LDFLAGS" not in variables
    assert variables["LDCXXSHARED"].endswith(" -L/mine")


@pytest.mark.parametrize("mine", [False, True])
def test_byteps_on_a_machine_with_gpus(
    tmp_path, nccl_of_pip, monkeypatch, mine
):
    if mine:
        header = tmp_path / "mine/include/cuda_runtime_api.h"
        header.parent.mkdir(parents=True)
        header.touch()
        monkeypatch.setenv("BYTEPS_CUDA_HOME", str(tmp_path / "mine"))
    variables = build_environment(BytePS(with_nccl=True), tmp_path)
    assert not {"cuda_runtime.h", "nccl.h"} & headers(variables)
    # Of the compiler's package, which has headers of the runtime.
    assert "host_config.h" in headers(variables)
    # communicator.h needs it, and NVIDIA's headers do not bring it in.
    assert " -include memory " in variables["CXX"]
    home = Path(variables["BYTEPS_NCCL_HOME"])
    assert (home / "include/nccl.h").is_file()
    assert (home / "lib/libnccl.so").is_file()
    runtime = "$ORIGIN/../../nvidia/cuda_runtime/lib"
    if mine:
        runtime = f"{tmp_path}/mine/lib64"
    else:
        cuda = Path(variables["BYTEPS_CUDA_HOME"])
        assert (cuda / "lib/libcudart.so").is_file()
    for linker in (variables["LDSHARED"], variables["LDCXXSHARED"]):
        assert linker.endswith(
            f" -Wl,-rpath,$ORIGIN/../../nvidia/nccl/lib -Wl,-rpath,{runtime}"
        )


def test_horovod_without_a_cuda_toolkit(tmp_path, nccl_of_pip, monkeypatch):
    """NVIDIA's packages are the toolkit, as they will be installed."""
    nvcc = toolchain.Tool("nvcc", "", "packages")
    monkeypatch.setattr(toolchain, "find_nvcc", lambda variables: nvcc)
    variables = build_environment(Horovod(with_nccl=True), tmp_path)
    cuda = tmp_path / "tools/nvidia/cu13"
    assert variables["HOROVOD_CUDA_HOME"] == str(cuda)
    (cuda / "lib").mkdir(parents=True)
    (cuda / "lib/libcudart.so.13").touch()
    links = Path(variables["CMAKE_LIBRARY_PATH"])
    assert (links / "libcudart.so").is_file()
    assert variables["LIBRARY_PATH"].startswith(f"{cuda}/lib")
    _, header = variables["CXXFLAGS"].split("-include ")
    assert "AsGpuStreamValue(Stream* stream)" in Path(header).read_text()


def test_what_a_wheel_is_for():
    import tensorflow as tf

    facts = recipe.target_facts()
    assert facts["tensorflow"].endswith(f" {tf.__version__}")
    # What is found without the import is what TensorFlow says itself.
    headers = recipe.tensorflow_folder() / "include"
    assert str(headers) == tf.sysconfig.get_include()


def test_an_engine_is_looked_at_with_the_backend_that_it_needs(monkeypatch):
    """Whatever Keras's is here, which the doctor names by itself."""
    asked = []
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setattr(
        "keras_towers.jobs.building.recipe.metadata.distribution",
        lambda name: SimpleNamespace(version="1", read_text=lambda file: None),
    )
    monkeypatch.setattr(
        "keras_towers.jobs.building.recipe.ask_python",
        lambda command, limit_s, variables: asked.append(variables) or {},
    )
    monkeypatch.setattr(Horovod, "built_for", lambda self, package: "")
    assert Horovod().find_installed().loads
    assert asked[0]["KERAS_BACKEND"] == "tensorflow"

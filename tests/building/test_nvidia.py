"""Where NVIDIA's libraries are found."""

import pytest

from keras_towers.building import nvidia, toolchain
from keras_towers.building.byteps import BytePS

pytestmark = pytest.mark.core


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """A machine without any of it."""
    monkeypatch.setattr(toolchain, "search_path", lambda: str(tmp_path))
    monkeypatch.setattr(nvidia, "_toolkits", lambda: iter(()))
    monkeypatch.setattr(nvidia, "_package", lambda name: None)
    for name in ("CUDA_HOME", "X_CUDA_HOME", "X_NCCL_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_nothing_there(nowhere):
    *_, cuda, nccl = toolchain.problems(BytePS(with_nccl=True).tools())
    assert "cuda_runtime.h, or one that it includes, not found" in cuda
    assert "nvidia-cuda-runtime-cu12 nvidia-cuda-nvcc-cu12" in cuda
    assert "BYTEPS_CUDA_HOME" in cuda
    assert "nccl.h not found" in nccl and "BYTEPS_NCCL_HOME" in nccl


def test_the_packages_of_pip(pip_packages):
    cuda, nccl = nvidia.find_cuda("X"), nvidia.find_nccl("X")
    assert (cuda.path, cuda.version) == (
        str(pip_packages / "cuda_runtime"),
        "12.5",
    )
    assert (nccl.path, nccl.version) == (str(pip_packages / "nccl"), "2.27.3")


def test_a_runtime_without_the_headers_it_includes(pip_packages, monkeypatch):
    (pip_packages / "cuda_cccl/include/nv/target").unlink()
    monkeypatch.setattr(nvidia, "_toolkits", lambda: iter(()))
    assert nvidia.find_cuda("X").path != str(pip_packages / "cuda_runtime")


@pytest.mark.parametrize(
    ("name", "find", "header"),
    [
        ("X_CUDA_HOME", nvidia.find_cuda, "cuda_runtime.h"),
        ("X_NCCL_HOME", nvidia.find_nccl, "nccl.h"),
    ],
)
def test_the_users_choice(
    name, find, header, tmp_path, pip_packages, monkeypatch
):
    monkeypatch.setenv(name, str(tmp_path / "mine"))
    path = tmp_path / "mine" / "include" / header
    path.parent.mkdir(parents=True)
    path.write_text("")
    home = find("X").path
    assert home == str(tmp_path / "mine")
    assert nvidia.linkable(home, tmp_path / "links") == (home, "")

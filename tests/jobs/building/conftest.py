"""What builds for GPUs look for."""

import sys

import pytest

RUNTIME = "#define CUDART_VERSION  12050\n"
VERSION = "#define NCCL_MAJOR 2\n#define NCCL_MINOR 27\n#define NCCL_PATCH 3\n"


@pytest.fixture
def nccl_of_pip(tmp_path, monkeypatch):
    """NCCL as TensorFlow's GPU build brings it, as far as builds look at it."""
    nvidia = tmp_path / "site/nvidia"
    home = nvidia / "nccl"
    for name, text in (
        ("nccl/include/nccl.h", VERSION),
        ("nccl/lib/libnccl.so.2", ""),
        ("cuda_runtime/include/cuda_runtime_api.h", RUNTIME),
        ("cuda_runtime/lib/libcudart.so.12", ""),
        ("cuda_nvcc/include/crt/host_config.h", ""),
    ):
        path = nvidia / name
        path.parent.mkdir(parents=True)
        path.write_text(text)

    def forget():
        for name in list(sys.modules):
            if name.partition(".")[0] == "nvidia":
                del sys.modules[name]

    forget()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for name in ("CUDA_HOME", "BYTEPS_CUDA_HOME", "BYTEPS_NCCL_HOME"):
        monkeypatch.delenv(name, raising=False)
    yield home
    forget()

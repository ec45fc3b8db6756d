"""What builds for GPUs look for."""

import sys

import pytest

_HEADERS = {
    "cuda_runtime/include/cuda_runtime.h": "",
    "cuda_runtime/include/cuda_runtime_api.h": (
        "#define CUDART_VERSION  12050\n"
    ),
    "cuda_runtime/lib/libcudart.so.12": "",
    "cuda_nvcc/include/crt/host_config.h": "",
    "cuda_cccl/include/nv/target": "",
    "nccl/include/nccl.h": (
        "#define NCCL_MAJOR 2\n#define NCCL_MINOR 27\n#define NCCL_PATCH 3\n"
    ),
    "nccl/lib/libnccl.so.2": "",
}


@pytest.fixture
def pip_packages(tmp_path, monkeypatch):
    """What TensorFlow's GPU build brings, as far as builds look at it."""
    site = tmp_path / "site"
    for name, text in _HEADERS.items():
        path = site / "nvidia" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in list(sys.modules):
        if name.partition(".")[0] == "nvidia":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(site))
    for name in ("CUDA_HOME", "BYTEPS_CUDA_HOME", "BYTEPS_NCCL_HOME"):
        monkeypatch.delenv(name, raising=False)
    yield site / "nvidia"
    for name in list(sys.modules):
        if name.partition(".")[0] == "nvidia":
            sys.modules.pop(name)

"""What builds for GPUs look for."""

import sys

import pytest

VERSION = "#define NCCL_MAJOR 2\n#define NCCL_MINOR 27\n#define NCCL_PATCH 3\n"


@pytest.fixture
def nccl_of_pip(tmp_path, monkeypatch):
    """NCCL as TensorFlow's GPU build brings it, as far as builds look at it."""
    home = tmp_path / "site/nvidia/nccl"
    for name, text in (("include/nccl.h", VERSION), ("lib/libnccl.so.2", "")):
        path = home / name
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

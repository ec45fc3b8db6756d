"""A script is checked before anything starts, and none of it runs."""

import py_compile
import zipapp

import pytest

from keras_towers.foundation.errors import TowerError
from keras_towers.jobs.launching.script_source import check_script

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    never = "raise SystemExit('it runs')\n"
    for path, text in {
        "good.py": never,
        "half.py": never + "print(",
        "invalid.py": "x = '\\d' = 3",
        "python3.py": never,
        "package/__init__.py": never,
        "package/good.py": never,
        "package/half.py": "if",
        "package/inner/__init__.py": never,
        "package/inner/__main__.py": never,
        "package/bare/within/good.py": never,
        "zipped/__main__.py": never,
        "latin.py": "# -*- coding: latin-1 -*-\nx = 'é'\n",
        "warns.py": "x = '\\d'\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        encoding = "latin-1" if path == "latin.py" else "utf-8"
        (tmp_path / path).write_text(text, encoding=encoding)
    (tmp_path / "python").write_bytes(b"\x7fELF\0")
    (tmp_path / "data").write_bytes(b"x\0")
    (tmp_path / "wrong.py").write_bytes("x = 'é'\n".encode("latin-1"))
    (tmp_path / "hidden.py").symlink_to("hidden.py")
    py_compile.compile("good.py", "good.pyc")
    zipapp.create_archive("zipped", "app.pyz")


@pytest.mark.parametrize(
    ("script", "module"),
    [
        *((name, False) for name in ("good.py", "python3.py", "latin.py")),
        *((name, False) for name in ("warns.py", "good.pyc", "app.pyz")),
        *((name, True) for name in ("good", "package.good", "package.inner")),
        ("package.bare.within.good", True),
        # As it is found; what Python runs without a source is not read.
        *((name, True) for name in ("pytest", "json.tool", "keras_towers")),
    ],
)
def test_what_python_can_run_passes(script, module, recwarn):
    check_script(script, module)
    assert not recwarn


@pytest.mark.parametrize(
    ("script", "module", "said"),
    [
        ("none.py", False, "script not found: none.py"),
        ("package", False, "script not found: package"),
        ("hidden.py", False, "cannot read hidden.py: Too many levels"),
        ("half.py", False, "half.py, line 2: '(' was never closed: print("),
        ("invalid.py", False, "invalid.py, line 1: cannot assign to literal"),
        ("wrong.py", False, "wrong.py, line 1: (unicode error) 'utf-8' codec"),
        ("data", False, "data"),
        ("python", False, "give the script itself, without 'python'"),
        ("none", True, "no module named 'none'"),
        ("none.inner", True, "no module named 'none.inner'"),
        ("good.inner", True, "no module named 'good.inner'"),
        ("good.py", True, "no module named 'good.py'"),
        ("package", True, "no module named 'package.__main__'"),
        ("package.half", True, "package/half.py, line 1: invalid syntax: if"),
        ("", True, "no module named ''"),
    ],
)
def test_what_it_cannot_run_is_named(script, module, said):
    with pytest.raises(TowerError) as raised:
        check_script(script, module)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)

"""The heart of the tests on every Python, and the versions that it supports.

The versions are read from pyproject.toml. Interpreters that are not installed
are listed as skipped.
"""

import nox
from packaging.requirements import Requirement

nox.options.sessions = ["heart"]
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True

PYPROJECT = nox.project.load_toml("pyproject.toml")
PYTHONS = nox.project.python_versions(PYPROJECT)


def lowest() -> list[str]:
    """The first minor versions of Keras and TensorFlow that are allowed."""
    project = PYPROJECT["project"]
    declared = [
        *project["dependencies"],
        *project["optional-dependencies"]["cpu"],
    ]
    return [
        f"{wanted.name}=={bound.version}.*"
        for wanted in map(Requirement, declared)
        for bound in wanted.specifier
        if wanted.name in ("keras", "tensorflow-cpu") and bound.operator == ">="
    ]


@nox.session(python=PYTHONS)
@nox.parametrize("versions", ["lowest", "highest"])
def heart(session: nox.Session, versions: str) -> None:
    """Run the tests marked core; arguments after -- go to pytest."""
    pinned = lowest() if versions == "lowest" else []
    session.install("--upgrade", "--editable", ".[cpu,test]", *pinned)
    session.run("keras-towers", "--version")
    session.run("python", "-m", "pytest", "-m", "core", *session.posargs)

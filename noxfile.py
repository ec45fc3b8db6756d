"""The heart of the tests on every Python, and on corners of the versions.

The lowest and the highest versions are read from pyproject.toml. Interpreters
that are not installed are listed as skipped.
"""

import pathlib

import nox
from nox.command import CommandFailed
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

nox.options.sessions = ["heart"]
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True

PYPROJECT = nox.project.load_toml("pyproject.toml")
PYTHONS = nox.project.python_versions(PYPROJECT)
# Equal to one device; also every class that Keras has, of which other versions
# have others.
CONTRACT = "tests/exactness"
FRAMEWORKS = ("keras", "tensorflow-cpu")
# The packages that have them may be keras-nightly and another TensorFlow.
VERSIONS = """
from importlib.metadata import packages_distributions, version
names = [packages_distributions()[name][0] for name in ("keras", "tensorflow")]
print(*(f"{name} {version(name)}" for name in names), sep=" and ")
"""
# Keras's development version: a package of its own, with the files of keras.
NIGHTLY = "keras-nightly"
# What `newest` tried, in a line.
REPORT = pathlib.Path(".nox", "newest.txt")


def requirements(*extras: str) -> list[Requirement]:
    """What the package requires, also by its extras, and by theirs."""
    project = PYPROJECT["project"]
    declared = list(project["dependencies"])
    for extra in extras:
        declared += project["optional-dependencies"][extra]
    found = []
    for wanted in map(Requirement, declared):
        if wanted.name == project["name"]:
            found += requirements(*sorted(wanted.extras))
        else:
            found.append(wanted)
    return found


def lowest() -> list[str]:
    """The first minor versions of Keras and TensorFlow that are allowed."""
    return [
        f"{wanted.name}=={bound.version}.*"
        for wanted in requirements("cpu")
        for bound in wanted.specifier
        if wanted.name in FRAMEWORKS and bound.operator == ">="
    ]


def corners() -> list[nox.param]:
    """Versions, each pair on a Python that its TensorFlow has."""
    pinned = [
        ("3.11", lowest()),
        ("3.12", ["keras==3.10.*", "tensorflow-cpu==2.18.*"]),
        ("3.13", ["keras==3.13.*", "tensorflow-cpu==2.20.*"]),
    ]
    highest = [(python, []) for python in PYTHONS]
    return [
        nox.param(python, versions, id="-".join([python, *versions]))
        for python, versions in (*pinned, *highest)
    ]


def unbounded(*extras: str, pre: bool = False) -> list[str]:
    """The requirements without an upper bound of their versions.

    Args:
        *extras: of the package.
        pre: also of Keras and TensorFlow versions that are not yet released.
    """
    found = {}
    for wanted in requirements(*extras):
        bounds = [
            b for b in wanted.specifier if b.operator in (">=", ">", "!=")
        ]
        # A bound that is a pre-release itself makes pip take others, too.
        end = ".dev0" if pre and wanted.name in FRAMEWORKS else ""
        wanted.specifier = SpecifierSet(
            ",".join(f"{bound}{end}" for bound in bounds)
        )
        found[str(wanted)] = None
    return list(found)


def failure(session: nox.Session, *command: str) -> str:
    """Run a command; returns why it failed, or an empty string."""
    try:
        session.run(*command)
    except CommandFailed as error:
        return f"failed ({error.reason})"
    return ""


def run_pytest(session: nox.Session, *arguments: str) -> dict[str, str]:
    """Run the tests marked core and those of the contract, or given files.

    Args:
        session: has the package installed.
        *arguments: of pytest.

    Returns:
        Why what was run failed, by its name; empty strings for what passed.
    """
    pytest = "python", "-m", "pytest"
    files = " ".join(a for a in arguments if a.startswith("tests/"))
    if files:
        return {files: failure(session, *pytest, *arguments)}
    return {
        "the core tests": failure(session, *pytest, "-m", "core", *arguments),
        # Also those that `make test` does not draw.
        CONTRACT: failure(session, *pytest, "-m", "", CONTRACT, *arguments),
    }


def end(session: nox.Session, results: dict[str, str]) -> None:
    """Fail if anything did."""
    failed = [f"{name} {why}" for name, why in results.items() if why]
    if failed:
        session.error("; ".join(failed))


@nox.session
@nox.parametrize("python,pinned", corners())
def heart(session: nox.Session, pinned: list[str]) -> None:
    """Run the tests marked core, and the contract; takes pytest's arguments.

    Where no version is pinned, it takes the highest.
    """
    session.install("--upgrade", "--editable", ".[cpu,test]", *pinned)
    session.run("keras-towers", "--version")
    end(session, run_pytest(session, *session.posargs))


@nox.session
def newest(session: nox.Session) -> None:
    """Run the same on the newest Keras and TensorFlow, allowed or not.

    Takes pytest's arguments, and --pre for versions that are not yet released:
    of Keras, its development version.
    """
    REPORT.unlink(missing_ok=True)
    pre = "--pre" in session.posargs
    arguments = [a for a in session.posargs if a != "--pre"]
    wanted = unbounded("cpu", "test", pre=pre)
    # Also of an earlier run: what is left of two that share files is neither.
    pip = "python", "-m", "pip"
    session.run(*pip, "uninstall", "--yes", "--quiet", "keras", NIGHTLY)
    session.install("--upgrade", *wanted)
    if pre:
        # TensorFlow requires keras, and has then brought all that this needs.
        session.run(*pip, "uninstall", "--yes", "--quiet", "keras")
        session.install("--pre", "--no-deps", NIGHTLY)
    session.install("--no-deps", "--editable", ".")
    found = session.run("python", "-c", VERSIONS, silent=True, log=False)
    name = "importing keras_towers"
    results = {name: failure(session, "python", "-c", "import keras_towers")}
    if not results[name]:
        results.update(run_pytest(session, *arguments))
    said = (f"{name} {why or 'passed'}" for name, why in results.items())
    # The last line, which nox would not leave to its sessions.
    REPORT.write_text(f"Tried {str(found).strip()}: {'; '.join(said)}.\n")
    end(session, results)

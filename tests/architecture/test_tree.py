"""What holds for the tree as a whole: layers, public names, generated code, no machine's traces."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (ROOT / "client/momentd", ROOT / "server/momentd_server", ROOT / "protos/momentd_wire")
SOURCES = sorted(
    path
    for package in PACKAGES
    for path in package.rglob("*.py")
    if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
)


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_the_layers_hold():
    done = _run("-c", "from importlinter.cli import lint_imports_command; lint_imports_command()")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("momentd", ("torch", "grpc", "lmdb", "numba", "momentd_server")),
        ("momentd.client", ("torch", "lmdb", "numba", "momentd_server")),
        ("momentd.optim", ("lmdb", "numba", "momentd_server")),
        ("momentd_wire.errors", ("torch", "grpc", "lmdb", "numba")),
        ("momentd_server.app", ("torch", "momentd")),
        ("momentd_server.cli.root", ("torch", "numba", "lmdb", "momentd")),
    ],
)
def test_importing_a_part_does_not_load_what_it_must_do_without(module, forbidden):
    """The layers forbid imports in the text; this one sees what is really loaded."""
    code = f"import sys, {module}; print(*(set({forbidden!r}) & set(sys.modules)))"
    done = _run("-W", "ignore", "-c", code)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_public_names_are_those_of_all_and_can_be_imported():
    import momentd

    public = {name for name in dir(momentd) if not name.startswith("_")}
    assert sorted(momentd.__all__) == sorted(set(momentd.__all__))
    assert public == set(momentd.__all__)
    for name in momentd.__all__:
        assert getattr(momentd, name) is not None


def test_the_error_tree_is_public_as_a_whole():
    import momentd.errors
    from momentd_wire import errors as wire

    classes = {
        name
        for name, value in vars(wire).items()
        if isinstance(value, type) and issubclass(value, wire.MomentdError)
    }
    assert set(momentd.errors.__all__) == classes
    assert all(getattr(momentd.errors, name) is getattr(wire, name) for name in classes)


def test_public_classes_and_methods_of_the_client_are_documented():
    import inspect

    import momentd

    missing = []
    for name in momentd.__all__:
        value = getattr(momentd, name)
        if inspect.ismodule(value):
            continue
        owners = [(name, value)]
        if inspect.isclass(value):
            owners += [
                (f"{name}.{method}", function)
                for method, function in vars(value).items()
                if inspect.isfunction(function) and not method.startswith("_")
            ]
        missing += [label for label, owner in owners if not (owner.__doc__ or "").strip()]
    assert missing == []


def test_generated_code_is_fresh():
    done = _run("scripts/gen_protos.py", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_generated_code_asks_for_no_more_than_the_declared_runtimes():
    text = "".join(path.read_text() for path in (ROOT / "protos").rglob("*_pb2*.py"))
    assert "# Protobuf Python Version: 5.29.0" in text
    assert "GRPC_GENERATED_VERSION = '1.71.2'" in text
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"grpcio>=1.71.2", "protobuf>=5.29,<8"} <= set(project["dependencies"])


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_assertions_only_tell_the_type_checker_something(path):
    """`python -O` removes them, so they must never be what refuses bad input."""
    checking = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert) and not _narrows_a_type(node.test)
    ]
    assert checking == []


def _narrows_a_type(test: ast.expr) -> bool:
    """`x is not None`, `isinstance(x, ...)`, and both joined by `and`."""
    if isinstance(test, ast.BoolOp):
        return all(map(_narrows_a_type, test.values))
    if isinstance(test, ast.Call):
        return isinstance(test.func, ast.Name) and test.func.id == "isinstance"
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is_for(path):
    assert (ast.get_docstring(ast.parse(path.read_text())) or "").strip()


def _tracked_files() -> list[Path]:
    done = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name]


# Written in two parts, so that this file does not find itself.
TRACES = (
    "/work" + "/",
    "/root" + "/",
    "/opt" + "/wheels",
    "/opt" + "/pypi",
    "pypi." + "org",
    "download.pytorch." + "org",
    "files.pythonhosted." + "org",
    "registry.npmjs." + "org",
    "deb.debian." + "org",
)


def test_no_file_names_a_machine_or_a_registry():
    found = []
    for path in _tracked_files():
        text = path.read_text("utf-8", "replace") if path.is_file() else ""
        found += [f"{path.relative_to(ROOT)}: {trace}" for trace in TRACES if trace in text]
    assert found == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_each_package_says_that_it_is_typed(package):
    assert (package / "py.typed").exists()


def test_the_installed_version_is_that_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert metadata.version("momentd") == project["version"]


def test_development_versions_are_exact_and_cover_what_is_declared():
    lines = [line for line in (ROOT / "constraints-dev.txt").read_text().splitlines() if line]
    pins = [line for line in lines if not line.startswith("#")]
    assert [pin for pin in pins if pin.count("==") != 1] == []
    pinned = {pin.split("==")[0].lower().replace("_", "-") for pin in pins}

    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = [
        *document["project"]["dependencies"],
        *(one for extra in document["project"]["optional-dependencies"].values() for one in extra),
        *(one for group in document["dependency-groups"].values() for one in group),
    ]
    names = {
        one.split(">=")[0].lower()
        for one in declared
        if isinstance(one, str) and not one.startswith("momentd[")
    }
    assert names - pinned == set()

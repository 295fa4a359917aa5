"""The entry point `momentd`, with and without the daemon's packages."""

import builtins
import sys
from importlib import metadata

import pytest

from momentd_server import cli


@pytest.fixture
def without(monkeypatch):
    """Makes a module missing, as in an installation of the client alone."""

    def remove(name):
        monkeypatch.delitem(sys.modules, "momentd_server.cli.root", raising=False)
        real = builtins.__import__

        def imports(wanted, *arguments, **options):
            if wanted == "momentd_server.cli.root":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return real(wanted, *arguments, **options)

        monkeypatch.setattr(builtins, "__import__", imports)

    return remove


def test_without_the_daemons_packages_it_says_what_to_install(without):
    without("click")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert "click" in str(ended.value)
    assert "momentd[server]" in str(ended.value)


def test_a_missing_part_of_momentd_itself_is_a_fault_and_stays_visible(without):
    without("momentd_server.lost")
    with pytest.raises(ModuleNotFoundError):
        cli.main()


def test_its_version_is_that_of_the_distribution(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["momentd", "--version"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert metadata.version("momentd") in capsys.readouterr().out

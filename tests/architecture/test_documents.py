"""Documents say what the code does: commands, settings, errors, files, links."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from momentd_server.cli.root import momentd
from momentd_server.config import ServeConfig
from momentd_server.rpc.status import STATUS
from momentd_server.storage import format as layout
from momentd_wire import errors
from momentd_wire.v1 import momentd_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]
OPERATIONS = (ROOT / "docs/operations.md").read_text()
PROTOCOL = (ROOT / "docs/protocol.md").read_text()
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("examples/*.md")]
)


def _commands(
    group: click.Group = momentd, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(_commands())


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_is_in_the_operations_guide(path):
    assert f"`momentd {' '.join(path)}" in OPERATIONS


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_option_is_in_the_operations_guide(path):
    command = COMMANDS[path]
    names = [
        name
        for option in command.params
        if isinstance(option, click.Option) and not option.hidden
        for name in (*option.opts, *option.secondary_opts)
    ]
    assert names
    assert [name for name in names if not re.search(rf"`{name}[ `]", OPERATIONS)] == []


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_and_option_explains_itself(path):
    command = COMMANDS[path]
    assert command.help
    unexplained = [
        option.name
        for option in command.params
        if isinstance(option, click.Option) and not option.hidden and not option.help
    ]
    assert unexplained == []


def test_every_command_takes_json_and_an_address_or_a_directory():
    for path, command in COMMANDS.items():
        options = {name for option in command.params for name in option.opts}
        assert "--json" in options, path
        assert {"--address", "--data-dir"} & options, path


def test_every_environment_variable_is_in_the_operations_guide():
    sources = [
        path for end in ("client", "server", "protos") for path in (ROOT / end).rglob("*.py")
    ]
    used = {
        name for path in sources for name in re.findall(r"\bMOMENTD_[A-Z_]+\b", path.read_text())
    }
    assert "MOMENTD_ADDRESS" in used
    assert {name for name in used if f"| `{name}` |" not in OPERATIONS} == set()


def test_defaults_in_the_command_line_are_those_of_the_configuration():
    help_text = " ".join(click.Context(COMMANDS["serve",]).get_help().split())
    for field in dataclasses.fields(ServeConfig):
        if field.name in {"read_threads", "max_sessions"}:
            assert f"default: {field.default}." in help_text


# ------------------------------------------------------------------------------ errors


def _error_rows() -> dict[str, tuple[str, str]]:
    rows = re.findall(r"^\| `([A-Z_]+)` \| `(\w+)` \| `([A-Z_]+)` \|", PROTOCOL, re.MULTILINE)
    return {reason: (name, status) for reason, name, status in rows}


def test_the_error_table_has_every_reason_with_its_class_and_status():
    expected = {}
    for reason, number in pb.Reason.items():
        if number != pb.REASON_UNSPECIFIED:
            name = type(errors.from_wire(pb.Error(reason=number))).__name__
            expected[reason.removeprefix("REASON_")] = (name, STATUS[number].name)
    assert _error_rows() == expected


def test_the_storage_format_names_what_the_code_writes():
    document = (ROOT / "docs/storage-format.md").read_text()
    assert f"Format version {layout.FORMAT_VERSION}." in document
    written = {
        value.decode("ascii").replace("\r", "\\r").replace("\n", "\\n")
        if isinstance(value, bytes)
        else value
        for name, value in vars(layout).items()
        if name.endswith(("_NAME", "_MAGIC", "_SUFFIX"))
    }
    assert len(written) > 5
    assert {word for word in written if word not in document} == set()


# ------------------------------------------------------------------------------ examples, links


def _command_lines() -> list[tuple[str, str]]:
    """(document, line) of every `momentd ...` in a code block."""
    found = []
    for path in DOCUMENTS:
        for block in re.findall(r"^```\w*\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL):
            joined = block.replace("\\\n", " ")
            found += [
                (path.name, line) for line in joined.splitlines() if line.startswith("momentd ")
            ]
    return found


@pytest.mark.parametrize(("document", "line"), _command_lines())
def test_every_command_line_in_a_document_is_accepted(document, line):
    words = shlex.split(line, comments=True)[1:]
    command: click.Command = momentd
    while isinstance(command, click.Group):
        command = command.commands[words.pop(0)]
    command.make_context("momentd", words, resilient_parsing=False).close()


@pytest.mark.parametrize("name", ["docker/Dockerfile", "docker/compose.yaml"])
def test_containers_run_commands_that_exist(name):
    text = (ROOT / name).read_text()
    lists = re.findall(r"(?:CMD|command:) \[([^\]]+)\]", text)
    assert lists
    for words in ([word.strip(' "') for word in found.split(",")] for found in lists):
        path, *arguments = words[1:] if words[0] == "momentd" else words
        COMMANDS[path,].make_context("momentd", arguments).close()


def _links() -> list[tuple[Path, str]]:
    return [
        (path, target)
        for path in DOCUMENTS
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text())
        if "://" not in target
    ]


@pytest.mark.parametrize(
    ("path", "target"), _links(), ids=lambda value: getattr(value, "name", value)
)
def test_every_link_leads_to_a_file(path, target):
    assert (path.parent / target).exists()


def test_every_source_file_named_in_the_architecture_exists():
    text = (ROOT / "docs/architecture.md").read_text()
    bases = ("", "client/momentd", "server/momentd_server", "protos/momentd_wire")
    # A name may be relative to its package, and to the folder of the file named before it.
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", text))
    assert len(named) > 15
    folders = [*bases, "client/momentd/optim"]
    lost = {name for name in named if not any((ROOT / base / name).exists() for base in folders)}
    assert lost == set()


def test_the_map_in_the_readme_names_what_is_there():
    block = (ROOT / "README.md").read_text().split("## Map of the tree")[1].split("```")[1]
    folder = ROOT
    for line in block.strip().splitlines():
        names = re.split(r"\s{2,}", line.strip())[0].split()
        base = folder if line.startswith("  ") else ROOT
        for name in names:
            assert (base / name).exists(), name
        if not line.startswith("  "):
            folder = ROOT / names[0]

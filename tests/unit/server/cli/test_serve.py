"""How options and environment become one configuration."""

from pathlib import Path

import click
import pytest

from momentd_server.cli.serve import build, serve
from momentd_wire.errors import InvalidArgument


@pytest.fixture
def configure(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in ("MOMENTD_ADDRESS", "MOMENTD_TOKEN", "MOMENTD_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)

    def parse(*arguments: str):
        context = serve.make_context("serve", list(arguments))
        options = {key: value for key, value in context.params.items() if key != "as_json"}
        return build(options)

    return parse


def test_options_are_read_with_their_units(configure, tmp_path):
    made = configure(
        "--data-dir", str(tmp_path), "--cache", "512MiB", "--address", f"unix:{tmp_path}/s.sock",
        "--arena", "1GiB", "--stop-timeout", "2m", "--allow-uid", "7", "--allow-uid", "8",
        "--threads", "2",
    )  # fmt: skip
    assert made.data_dir == tmp_path
    assert made.cache_bytes == 512 << 20
    assert str(made.address) == f"unix:{tmp_path}/s.sock"
    assert made.arena_bytes == 1 << 30
    assert made.stop_timeout_s == 120
    assert made.allow_uids == {7, 8}
    assert made.threads == 2


def test_without_options_the_defaults_hold(configure, tmp_path):
    made = configure()
    assert str(made.address) == f"unix:{tmp_path}/momentd/momentd.sock"
    assert 256 << 20 <= made.cache_bytes <= 16 << 30
    assert made.data_dir.name == "momentd"
    assert not made.auto_started


def test_the_environment_names_the_data_directory(configure, monkeypatch, tmp_path):
    monkeypatch.setenv("MOMENTD_DATA_DIR", str(tmp_path / "from-environment"))
    assert configure().data_dir == tmp_path / "from-environment"
    assert configure("--data-dir", str(tmp_path)).data_dir == tmp_path


def test_a_relative_data_directory_is_made_absolute(configure, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert configure("--data-dir", "state").data_dir == tmp_path / "state"


@pytest.mark.parametrize("size", ["1MiB", "0"])
def test_a_cache_below_the_least_is_refused_with_both_numbers(configure, size):
    with pytest.raises(InvalidArgument, match=r"--cache .*16 MiB"):
        configure("--cache", size)


def test_a_size_that_does_not_parse_is_wrong_usage(configure):
    with pytest.raises(click.BadParameter, match="512MiB"):
        configure("--cache", "lots")


def test_tcp_needs_a_token_or_tls(configure, tmp_path):
    with pytest.raises(InvalidArgument, match="--token-file"):
        configure("--listen", "127.0.0.1:7171")
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    made = configure("--listen", "127.0.0.1:7171", "--token-file", str(token))
    assert made.token == "0123456789abcdef"
    assert [address.target for address in made.listen] == ["127.0.0.1:7171"]


def test_a_certificate_needs_its_key(configure, tmp_path):
    certificate = tmp_path / "cert.pem"
    certificate.write_text("")
    with pytest.raises(click.UsageError, match="belong together"):
        configure("--tls-cert", str(certificate))
    with pytest.raises(click.UsageError, match="--tls-client-ca needs"):
        configure("--tls-client-ca", str(certificate))
    made = configure("--tls-cert", str(certificate), "--tls-key", str(certificate))
    assert made.tls is not None
    assert made.tls.certificate == Path(certificate)


def test_every_option_reaches_the_configuration():
    """An option that is forgotten in `build` would be refused by ServeConfig as unknown."""
    from dataclasses import fields

    from momentd_server.config import ServeConfig

    gathered = {"tls_cert", "tls_key", "tls_client_ca", "token_file", "as_json"}
    offered = {parameter.name for parameter in serve.params} - gathered
    known = {each.name for each in fields(ServeConfig)} - {"tls", "token"}
    assert offered == known

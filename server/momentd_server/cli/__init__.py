"""The command line. Nothing heavy is imported before it is known which command runs."""

import sys


def main() -> None:
    """Runs `momentd`; the process ends with the command's exit code."""
    try:
        from momentd_server.cli.root import momentd
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("momentd"):
            raise
        sys.exit(
            f"momentd: the package {error.name!r} is missing, so this is an installation of the "
            f"client alone; the daemon needs: pip install 'momentd[server]'"
        )
    momentd()

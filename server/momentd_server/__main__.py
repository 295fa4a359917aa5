"""`python -m momentd_server`: the same as the command `momentd`."""

from momentd_server.cli import main

if __name__ == "__main__":
    main()

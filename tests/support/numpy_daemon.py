"""`python -m tests.support.numpy_daemon DIR [SETTING=VALUE ...]`: a daemon over the numpy engine.

All of the real daemon but its store: signals, sockets, planes, sessions. Sessions are carried over
an orderly stop in a file of DIR, as the catalog does for the real engine.
"""

import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from momentd_server import app
from momentd_server.config import ServeConfig
from momentd_server.storage.catalog import SessionRecord, StreamRecord
from tests.support.numpy_engine import NumpyEngine
from tests.support.planes import make_config


class SavingEngine(NumpyEngine):
    def __init__(self, config: ServeConfig) -> None:
        self._file = config.data_dir / "sessions.json"
        super().__init__(saved=_load(self._file))
        delay_s = float(_SETTINGS.get("delay_s", 0))
        if delay_s:
            self.before_update = lambda: time.sleep(delay_s)

    def stop(self, *, discard: bool = False) -> None:
        super().stop(discard=discard)
        records = [asdict(record) for record in self.sessions.save()]
        self._file.write_text(json.dumps(records, default=lambda value: {"hex": value.hex()}))


def _load(path: Path) -> list[SessionRecord]:
    if not path.exists():
        return []
    records = []
    for fields in json.loads(path.read_text(), object_hook=_bytes):
        fields["streams"] = tuple(StreamRecord(**item) for item in fields["streams"])
        records.append(SessionRecord(**fields))
    return records


def _bytes(value: dict) -> object:
    return bytes.fromhex(value["hex"]) if set(value) == {"hex"} else value


_SETTINGS = dict(item.split("=", 1) for item in sys.argv[2:])


def main() -> int:
    directory = Path(sys.argv[1])
    config = make_config(directory)
    config.data_dir.mkdir(exist_ok=True)
    for name in ("stop_timeout_s", "idle_exit_s", "attach_grace_s"):
        if name in _SETTINGS:
            config = replace(config, **{name: float(_SETTINGS[name])})
    if _SETTINGS.get("auto"):
        config = replace(config, auto_started=True)
    return app.serve(
        config, as_json=True, start=lambda config, _report, _kept: SavingEngine(config)
    )


if __name__ == "__main__":
    sys.exit(main())

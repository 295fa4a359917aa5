"""R67, R79, R80: shared and virtual file systems break locks and files; they are refused."""

import pytest

from momentd_server.storage import datadir
from momentd_wire.errors import InvalidArgument


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "cifs", "9p", "virtiofs", "lustre", "glusterfs", "fuse.sshfs", "ceph"]
)
def test_a_data_directory_there_is_refused_with_its_type_and_the_remedy(
    tmp_path, monkeypatch, kind
):
    monkeypatch.setattr(datadir, "filesystem_type", lambda _path: kind)
    with pytest.raises(InvalidArgument, match=f"{kind}.*MOMENTD_DATA_DIR"):
        datadir.DataDir.open(tmp_path / "d")


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs"])
def test_local_ones_are_taken(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(datadir, "filesystem_type", lambda _path: kind)
    datadir.DataDir.open(tmp_path / "d").close()

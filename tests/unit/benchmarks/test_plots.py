"""A result that compares systems is drawn; what has nothing to compare is not."""

import json

import pytest
from matplotlib import image

from benchmarks import plots
from benchmarks.harness import Result, Row, Settings, publish


@pytest.fixture
def settings(tmp_path):
    return Settings(work_dir=tmp_path, results=tmp_path / "results")


def test_systems_are_drawn_beside_each_other(settings):
    result = Result(
        "hot",
        [
            Row("few rows", {"momentd_ms": 2.0, "torch_ms": 9.0, "lmdb_ms": 180.0, "ratio": 4.5}),
            Row("  files just written back", {"memmap_ms": 50.0, "mapping_ms": 40.0}),
            Row("many rows", {"momentd_ms": 6.0, "torch_ms": 29.0}),
        ],
    )
    (plot,) = plots.draw(publish(result, settings))

    pixels = image.imread(plot)
    assert plot.name == "hot.png"
    assert pixels.shape[0] > 200
    # The page shows through, and the bars of both systems are there, and none of a third.
    assert pixels[0, 0, 3] == 0
    assert _has(pixels, plots.SYSTEMS["momentd"][1])
    assert _has(pixels, plots.SYSTEMS["torch"][1])
    assert not _has(pixels, plots.SYSTEMS["memmap"][1])


def test_equal_results_give_equal_files(settings):
    path = publish(Result("hot", [Row("a", {"momentd_ms": 2.0, "torch_ms": 9.0})]), settings)

    first = plots.draw(path)[0].read_bytes()

    assert plots.draw(path)[0].read_bytes() == first


def test_result_of_one_system_is_not_drawn(settings):
    path = publish(Result("rows", [Row("1 M rows", {"median_ms": 2.0})]), settings)

    assert plots.draw(path) == []
    assert json.loads(path.read_text())["rows"]


def _has(pixels, colour):
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    near = abs(pixels[..., 0] - red) + abs(pixels[..., 1] - green) + abs(pixels[..., 2] - blue)
    return ((near < 0.02) & (pixels[..., 3] == 1)).sum() > 100

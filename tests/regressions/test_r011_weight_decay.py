"""R11: weight_decay is refused, not ignored."""

import pytest

import momentd
from tests.support.optim import embedding


def test_the_argument_does_not_exist(fake):
    with pytest.raises(TypeError, match="weight_decay"):
        momentd.SparseAdam(embedding().parameters(), weight_decay=0.1)

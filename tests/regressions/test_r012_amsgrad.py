"""R12: amsgrad is refused, not half done."""

import pytest

import momentd
from tests.support.optim import embedding


def test_the_argument_does_not_exist(fake):
    with pytest.raises(TypeError, match="amsgrad"):
        momentd.SparseAdam(embedding().parameters(), amsgrad=True)

"""Update rules by name, and the order of a batch."""

from __future__ import annotations

from typing import Final

from momentd_server.rules.batch import Plan, Scratch, plan
from momentd_server.rules.rule import STEP_LIMIT, Batch, Records, ResultKind, Rule
from momentd_server.rules.sparse_adam import SparseAdam, SparseAdamHyper
from momentd_wire.errors import UnsupportedFeature

_ALL: Final[tuple[Rule, ...]] = (SparseAdam(),)
_RULES: Final = {rule.name: rule for rule in _ALL}


def get(name: str) -> Rule:
    """The rule of this name, or UnsupportedFeature listing the known ones."""
    rule = _RULES.get(name)
    if rule is None:
        raise UnsupportedFeature(
            f"unknown update rule {name!r}; this daemon knows: {', '.join(names())}", rule=name
        )
    return rule


def names() -> tuple[str, ...]:
    """The names of all rules, sorted."""
    return tuple(sorted(_RULES))


__all__ = [
    "STEP_LIMIT",
    "Batch",
    "Plan",
    "Records",
    "ResultKind",
    "Rule",
    "Scratch",
    "SparseAdam",
    "SparseAdamHyper",
    "get",
    "names",
    "plan",
]

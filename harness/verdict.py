"""What came of lives under faults, counted and added up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Verdict:
    """Of one life or, added up, of many. silent, leaks: a sentence each; all of them are bugs.

    silent: other bits than the model's, or an error or a permission that nothing injected explains."""

    operations: int = 0
    injected: Counter[str] = field(default_factory=Counter)
    detected: int = 0
    tolerated: int = 0
    recovered: int = 0
    silent: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)

    def add(self, other: Verdict) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def sound(self) -> bool:
        return not self.silent and not self.leaks and self.detected + self.tolerated == self.injected.total()

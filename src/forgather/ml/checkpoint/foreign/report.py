"""Report of an import: what was taken over from a foreign directory, and what was not."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from forgather.ml.checkpoint.foreign.ownership import Owner


@dataclass(frozen=True)
class LeftOut:
    """Stands for a part of the state that is not taken over."""

    reason: str


@dataclass(frozen=True)
class ImportReport:
    """The same on every rank."""

    path: str
    owner: Owner
    taken: tuple[str, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    """What was not taken over -> why."""

    @property
    def message(self) -> str:
        """One message that lists everything."""
        lines = [f"Imported {self.path}, {self.owner.value}: {', '.join(self.taken) or 'nothing'}."]
        if self.left_out:
            lines.append("Not taken over:")
            lines.extend(f"  - {what}: {reason}" for what, reason in self.left_out.items())
        return "\n".join(lines)

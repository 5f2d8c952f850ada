"""Report of an import: which state was imported from a foreign checkpoint, and which was skipped and why.

`import_checkpoint` returns it and logs its message once, on rank 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from forgather.ml.checkpoint.foreign.ownership import Owner


@dataclass(frozen=True)
class LeftOut:
    """Placeholder for state that is not imported."""

    reason: str


@dataclass(frozen=True)
class ImportReport:
    """Result of an import, equal on every rank."""

    path: str
    owner: Owner
    taken: tuple[str, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Skipped component or content -> reason."""

    @property
    def message(self) -> str:
        """Log message that lists imported and skipped state."""
        lines = [f"Imported {self.path}, {self.owner.value}: {', '.join(self.taken) or 'nothing'}."]
        if self.left_out:
            lines.append("Not imported:")
            lines.extend(f"  - {what}: {reason}" for what, reason in self.left_out.items())
        return "\n".join(lines)

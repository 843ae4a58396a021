"""The parts of an engine that a snapshot holds besides profiles, such as its graphs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from hearth.snapshot.trial_mark import TrialMark


class SnapshotParts(Protocol):
    def save(self) -> Mapping[str, bytes]:
        """Return the state by section name. Called beside the step thread once every size was run."""

    def lacks_adapters(self, sections: Collection[str]) -> bool: ...

    def restore(
        self, sections: Mapping[str, memoryview], mark: TrialMark, discard: Callable[[str], None]
    ) -> None:
        """Restore the state from a snapshot with the engine's fingerprint; not on the step thread.

        `sections` may be kept, and its file stays open as long. `mark` is set while state is tried that may
        kill the process. If the state turns out to be wrong later, any thread calls `discard` with the
        reason. Raises SnapshotError: the state cannot be used, and the engine is unchanged.
        """

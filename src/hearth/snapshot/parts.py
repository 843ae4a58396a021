"""The parts of an engine that a snapshot holds besides profiles, as whoever makes and uses one sees them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from hearth.snapshot.trial_mark import TrialMark


class SnapshotParts(Protocol):
    """State of one engine that is worth keeping, such as its graphs."""

    def save(self) -> Mapping[str, bytes]:
        """Return the state by the names of sections, on a thread beside the steps; every size was run."""

    def lacks_adapters(self, sections: Collection[str]) -> bool:
        """True if these sections have not all that steps with adapters could have of a snapshot."""

    def restore(
        self, sections: Mapping[str, memoryview], mark: TrialMark, discard: Callable[[str], None]
    ) -> None:
        """Take the state over from a snapshot whose fingerprint is the engine's; not on the step thread.

        `sections` may be kept, and its file stays open as long as it is. `mark` is set while state is tried
        that may end the process. `discard` is called, by any thread and with the reason, if the state turns
        out to be wrong later: nobody uses the snapshot again.
        Raises SnapshotError: it cannot be used, and the engine is as it was.
        """

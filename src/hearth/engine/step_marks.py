"""The marks by which somebody outside can tell that the steps of an engine advance. Judges nothing.

On a CPU a layer is passed when it is computed. On other devices the host launches far ahead, and whole steps
are graphs: there the device advances when it is done with a step, and a layer says only that the host lives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hearth.core.types import RequestId


class StepMarks(Protocol):
    """The receiver of an engine's marks. Called by the thread that steps the engine."""

    def begun(self, request_ids: Sequence[RequestId]) -> None:
        """Note that a step is about to be launched, with rows of these requests."""

    def launched(self) -> None:
        """Note that the step is queued, or has failed to be; where the host computes, that it is computed."""

    def layer_passed(self) -> None:
        """Note that a layer was computed, or launched where steps are only launched."""

    def done(self) -> None:
        """Note that the device is done with the oldest step of this engine, and all launched before it."""

    def closed(self) -> None:
        """Note that no step of this engine is under way any more."""


class NoMarks:
    """Nobody looks, as where one process runs one model."""

    def begun(self, request_ids: Sequence[RequestId]) -> None:
        pass

    def launched(self) -> None:
        pass

    def layer_passed(self) -> None:
        pass

    def done(self) -> None:
        pass

    def closed(self) -> None:
        pass

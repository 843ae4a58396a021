"""A request on its way through the service, with all that it takes to carry on elsewhere. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from hearth.control.ask import Stream
from hearth.control.timeline import Timeline
from hearth.messages import GuideOrder, Sampling
from hearth.text.transcript import Transcript
from hearth.types import ModelId, RequestId, WorkerId


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """Mutable. The text thread writes `emitted`, the transcript and `is_complete`; the event loop the rest.

    They take turns: a run's tokens all pass the text thread before the loop hears that its worker is lost,
    and only then is the request given to another.
    """

    request_id: RequestId
    model: ModelId
    prompt: tuple[int, ...]
    sampling: Sampling
    guide: GuideOrder | None
    stream: Stream
    transcript: Transcript
    timeline: Timeline
    #: Tokens that came from workers, all of them: what a successor continues from.
    emitted: list[int] = field(default_factory=list)
    is_complete: bool = False  #: the text has its end, and later tokens are none of it
    run: int | None = None  #: None: not on a worker
    worker: WorkerId | None = None
    digest: str | None = None  #: of the version of the model that the prompt was made for; None: any

"""Who sends a request: what they may do, how much, and with whom they share. Checks no key: see `keys.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NewType

from hearth.policy.limits.key_limiter import KeyLimits

#: A user may ask, a monitor may also look at the whole service, an admin may also change it.
Role = Literal["user", "monitor", "admin"]
ROLES: tuple[Role, ...] = ("user", "monitor", "admin")  #: each may do all that those before it may

#: Callers of one group find each other's cached prefixes and may have each other's requests explained.
GroupId = NewType("GroupId", str)

#: One life of an API key: a later key of the same name has another id.
KeyId = NewType("KeyId", str)

#: Somebody reads along with interactive requests; batch requests have no pace and give way first.
ServiceClass = Literal["interactive", "batch"]
SERVICE_CLASSES: tuple[ServiceClass, ...] = ("interactive", "batch")


@dataclass(frozen=True, slots=True)
class KeyTerms:
    """The models, limits and class of service of a key."""

    limits: KeyLimits = field(default_factory=KeyLimits)
    models: tuple[str, ...] | None = None  #: names or aliases; None: all
    service_class: ServiceClass = "interactive"  #: the best that its requests get


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request."""

    name: str
    role: Role
    group: GroupId
    terms: KeyTerms = field(default_factory=KeyTerms)
    key_id: KeyId | None = None  #: None: there is no key, so nothing is limited and nothing counted

    def has_role(self, role: Role) -> bool:
        """True if the caller may do what a role may."""
        return ROLES.index(self.role) >= ROLES.index(role)

    def can_see(self, group: GroupId) -> bool:
        """True if the caller may know of requests that a group has sent."""
        return group == self.group or self.has_role("monitor")


#: Whoever calls a service that asks for no keys.
ANYBODY = Caller("anybody", "admin", GroupId("anybody"))
#: Commands on the service's own machine, which find its admin token.
OPERATOR = Caller("operator", "admin", GroupId("operator"))

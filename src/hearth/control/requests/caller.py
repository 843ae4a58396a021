"""The sender of a request: role, limits and group. Checks no key: see `keys.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NewType

from hearth.policy.limits.key_limiter import KeyLimits

#: A user sends requests, a monitor also sees the whole service, an admin also changes it.
Role = Literal["user", "monitor", "admin"]
ROLES: tuple[Role, ...] = ("user", "monitor", "admin")  #: each includes those before it

#: Callers of one group share cached prefixes and may see explanations of each other's requests.
GroupId = NewType("GroupId", str)

#: One life of an API key: a later key of the same name has another id.
KeyId = NewType("KeyId", str)

#: A client reads interactive answers as they come. Batch requests have no pace and lower priority.
ServiceClass = Literal["interactive", "batch"]
SERVICE_CLASSES: tuple[ServiceClass, ...] = ("interactive", "batch")


@dataclass(frozen=True, slots=True)
class KeyTerms:
    limits: KeyLimits = field(default_factory=KeyLimits)
    models: tuple[str, ...] | None = None  #: names or aliases; None: all
    service_class: ServiceClass = "interactive"  #: the best that its requests get


@dataclass(frozen=True, slots=True)
class Caller:
    name: str
    role: Role
    group: GroupId
    terms: KeyTerms = field(default_factory=KeyTerms)
    key_id: KeyId | None = None  #: None: there is no key, so nothing is limited and nothing counted

    def has_role(self, role: Role) -> bool:
        return ROLES.index(self.role) >= ROLES.index(role)

    def can_see(self, group: GroupId) -> bool:
        return group == self.group or self.has_role("monitor")


ANYBODY = Caller("anybody", "admin", GroupId("anybody"))
#: Commands on the service's own machine, which find its admin token.
OPERATOR = Caller("operator", "admin", GroupId("operator"))

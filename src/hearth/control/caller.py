"""Who sends a request: what they may do, and with whom they share. Checks no key: that is `keys.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NewType

#: A user may ask, a monitor may also look at the whole service, an admin may also change it.
Role = Literal["user", "monitor", "admin"]
ROLES: tuple[Role, ...] = ("user", "monitor", "admin")  #: each may do all that those before it may

#: Callers of one group find each other's cached prefixes and may have each other's requests explained.
GroupId = NewType("GroupId", str)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request."""

    name: str
    role: Role
    group: GroupId

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

from __future__ import annotations

import pytest

from hearth.control.requests.caller import ANYBODY, OPERATOR, Caller, GroupId, Role


@pytest.mark.parametrize(
    ("role", "roles"), [("user", 1), ("monitor", 2), ("admin", 3)], ids=["user", "monitor", "admin"]
)
def test_each_role_may_do_what_those_below_it_may(role: Role, roles: int) -> None:
    caller = Caller("ada", role, GroupId("g"))
    needed: tuple[Role, ...] = ("user", "monitor", "admin")
    assert [caller.has_role(one) for one in needed] == [True] * roles + [False] * (3 - roles)


def test_a_user_sees_its_own_group_alone() -> None:
    user, monitor = Caller("ada", "user", GroupId("g")), Caller("eve", "monitor", GroupId("h"))
    assert [user.can_see(GroupId(group)) for group in ("g", "h")] == [True, False]
    assert [monitor.can_see(GroupId(group)) for group in ("g", "h")] == [True, True]


def test_nobody_is_in_the_group_of_the_machines_own_commands() -> None:
    assert ANYBODY.group != OPERATOR.group

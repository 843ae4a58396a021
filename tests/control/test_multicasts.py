"""Which nodes are told to fetch a model from which others."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from hearth.control.multicasts import Multicasts, Plan
from hearth.core.node_messages import HeldChunks, LinkSpeed
from hearth.core.types import LOCAL, Digest, NodeId
from hearth.store.format.manifest import Manifest
from tests.store.stored import stored_at, write_model

#: So slow that each layer is a part of its own.
SLOW = LinkSpeed(LOCAL, 1e4, 0.0)
NODES = [NodeId(name) for name in ("a", "b", "c", "d")]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    write_model(directory)
    found = stored_at(directory).manifest
    assert isinstance(found, Manifest)
    return found


def held(manifest: Manifest, chunks: range) -> HeldChunks:
    mask = sum(1 << index for index in chunks)
    return HeldChunks(manifest.digest, b"", mask.to_bytes(len(manifest.chunks) // 8 + 1, "little"))


def plans(
    multicasts: Multicasts,
    manifest: Manifest,
    loading: list[NodeId],
    holders: Mapping[NodeId, HeldChunks | None],
    first: int = 0,
) -> dict[NodeId, Plan]:
    numbers = {one: first + at for at, one in enumerate(loading)}
    return {one: multicasts.plan_for(one, manifest.digest, numbers, holders, [SLOW]) for one in NODES}


def test_every_node_fetches_all_chunks_and_the_head_sends_each_once(manifest: Manifest) -> None:
    every = range(len(manifest.chunks))
    found = plans(Multicasts(lambda _: manifest), manifest, NODES, {LOCAL: held(manifest, every)})
    for plan in found.values():
        assert {index for one in plan for index in range(one.begin, one.end)} == set(every)
    num_sent = sum(one.node == LOCAL for plan in found.values() for one in plan)
    assert num_sent == 3, "of eight; nodes pass on the others"
    assert sum(map(len, found.values())) == 2 * len(NODES)


def test_a_node_that_loads_alone_or_has_all_is_told_nothing(manifest: Manifest) -> None:
    multicasts, every = Multicasts(lambda _: manifest), range(len(manifest.chunks))
    holders = {LOCAL: held(manifest, every), NODES[1]: held(manifest, every)}
    assert not any(plans(multicasts, manifest, NODES[:2], holders).values())
    assert not any(plans(multicasts, manifest, NODES, {NODES[0]: held(manifest, every[1:])}).values())
    assert not any(plans(Multicasts(lambda _: None), manifest, NODES, holders).values()), "it was removed"


def test_plans_stay_while_their_nodes_load(manifest: Manifest) -> None:
    multicasts, holders = Multicasts(lambda _: manifest), {LOCAL: None}
    first = plans(multicasts, manifest, NODES[:2], holders)
    assert not first[NODES[2]]
    later = plans(multicasts, manifest, NODES, holders)
    assert {one: later[one] for one in NODES[:2]} == {one: first[one] for one in NODES[:2]}
    assert {one.node for plan in (later[NODES[2]], later[NODES[3]]) for one in plan} <= {LOCAL, *NODES[2:]}
    again = plans(multicasts, manifest, NODES[:2], holders, first=10)
    assert again[NODES[0]], "of another load"
    assert not plans(multicasts, manifest, NODES[:1], holders, first=20)[NODES[0]], "the other has it now"
    assert not any(plans(multicasts, manifest, [], holders).values())


def test_a_node_that_began_alone_is_in_no_plan(manifest: Manifest) -> None:
    multicasts, holders = Multicasts(lambda _: manifest), {LOCAL: None}
    assert not multicasts.plan_for(NODES[0], manifest.digest, {NODES[0]: 0}, holders, [SLOW])
    found = plans(multicasts, manifest, NODES, holders)
    assert not found[NODES[0]]
    assert {one.node for plan in found.values() for one in plan} <= {LOCAL, *NODES[1:]}


def test_several_sources_begin_with_different_parts(manifest: Manifest) -> None:
    every = range(len(manifest.chunks))
    holders = {one: held(manifest, every) for one in (LOCAL, NodeId("z"))}
    found = plans(Multicasts(lambda _: manifest), manifest, NODES, holders)
    firsts = {plan[0].node: plan[0].begin for plan in found.values() if plan[0].node in holders}
    assert len(set(firsts.values())) == 2


def test_a_model_of_another_digest_is_another(manifest: Manifest) -> None:
    multicasts = Multicasts(lambda digest: manifest if digest == manifest.digest else None)
    assert not multicasts.plan_for(NODES[0], Digest("x"), dict.fromkeys(NODES, 1), {}, ())

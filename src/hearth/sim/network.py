"""Machines of a simulated service: which has which model, and when the parts that one fetches are there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hearth.core.types import LOCAL, ModelId, NodeId, Rung
from hearth.policy.memory.demand import Demand
from hearth.policy.memory.reload_cost import HORIZON_S
from hearth.policy.multicast.parts import SEND_S, choose_num_parts
from hearth.policy.multicast.schedules import Schedule, multicast


@dataclass(frozen=True, slots=True)
class Transfers:
    """How models come to machines."""

    link_bytes_per_s: float = 25e9 / 8  #: of each machine, in each direction
    disk_bytes_per_s: float | None = (
        None  #: of each machine, whose disk has all models; None: no disk has any
    )
    #: Host memory of each machine for weights. It begins with the first models that fit, and those that
    #: are least likely to be wanted leave first. Infinite: the first machine may keep all models.
    host_bytes: float = math.inf
    #: How long a machine keeps a model in host memory after its last replica there.
    keep_s: float = math.inf
    is_origin_kept: bool = True  #: the first machine always has all models, if host memory is infinite
    uses_peers: bool = True
    setup_s: float = 0.0  #: before machines send to each other
    #: By the numbers of sources, receivers and parts.
    schedule: Callable[[int, int, int], Schedule] = multicast


@dataclass(frozen=True, slots=True)
class Fetched:
    source: NodeId | None  #: of its first part; None: its own disk
    began_s: float
    parts_s: tuple[float, ...]  #: when each part arrived

    @property
    def arrived_s(self) -> float:
        return max(self.parts_s)

    @property
    def rung(self) -> Rung:
        return Rung.DISK if self.source is None else Rung.PEER

    def stage_s(self, begin: float, end: float) -> float:
        """Return when a share of the model has arrived, from `begin` to `end` of 1."""
        num_parts = len(self.parts_s)
        first, last = math.floor(begin * num_parts), math.ceil(end * num_parts)
        return max(self.parts_s[first : max(last, first + 1)])


@dataclass(slots=True)
class _Copy:
    fetched: Fetched
    num_bytes: float = math.inf  #: of its end, which is what workers lack
    until_s: float = math.inf  #: it is gone by then


@dataclass(slots=True)
class _Wires:
    """When links and disks are free. Copied to try a fetch."""

    up_s: dict[NodeId, float] = field(default_factory=dict)
    down_s: dict[NodeId, float] = field(default_factory=dict)
    disk_s: dict[NodeId, float] = field(default_factory=dict)

    def copy(self) -> _Wires:
        return _Wires(self.up_s.copy(), self.down_s.copy(), self.disk_s.copy())


_ALWAYS = Fetched(None, -math.inf, (-math.inf,))


class SimulatedNetwork:
    """Machines send parts of models to each other by a schedule, one up and one down at a time.

    Those that begin to fetch a model at the same time share a schedule. Its sources are the machines that
    have the whole model and send nothing. If there are none, it is the machine from which the model comes
    first, perhaps one that is still receiving it. A machine reads its own disk if that is faster.

    Mutable; written by its service.
    """

    def __init__(self, transfers: Transfers, num_layers: int) -> None:
        self._transfers, self._num_layers = transfers, num_layers
        self.bytes_fetched = self.bytes_read = 0  #: from other machines and from disks
        self.most_host_bytes = 0.0  #: in host memory of a machine at a time, if that is finite
        self._wires = _Wires()
        self.demand = Demand()
        self._copies: dict[ModelId, dict[NodeId, _Copy]] = {}
        self.left: list[tuple[ModelId, NodeId]] = []  #: host memory since the service looked

    def begin_with(self, model: ModelId, nodes: Sequence[NodeId], num_bytes: int) -> None:
        """Keep a model in finite host memory of machines from the beginning, where it fits."""
        for node in nodes:
            if self._transfers.host_bytes - self._host_bytes(node) >= num_bytes:
                self._keep_copy(model, node, _Copy(_ALWAYS, num_bytes))

    def asked(self, model: ModelId, now_s: float) -> None:
        self.demand.arrived(model, now_s)

    def find(self, model: ModelId, node: NodeId, now_s: float, num_bytes: float = 0) -> Fetched | None:
        """Return how a machine has got what it needs of a model, or will; None: it has to fetch it."""
        copy = self._holders(model, now_s).get(node)
        return None if copy is None or copy.num_bytes < num_bytes else copy.fetched

    def host_bytes_of(self, model: ModelId, node: NodeId, now_s: float) -> float:
        copy = self._holders(model, now_s).get(node)
        return 0 if copy is None else copy.num_bytes

    def keep(self, model: ModelId, node: NodeId, until_s: float = math.inf) -> None:
        """Keep a model in the host memory of a machine until then. The origin keeps it for ever."""
        copy = self._copies[model].get(node)
        if copy is not None and copy.fetched is not _ALWAYS:
            copy.until_s = until_s

    def fetch(
        self, model: ModelId, nodes: Sequence[NodeId], num_bytes: int, now_s: float
    ) -> dict[NodeId, Fetched]:
        """Bring a model, or the end of it, to machines that lack it, all at once."""
        wires, fetched = self._read(nodes, num_bytes, now_s)
        if self._transfers.uses_peers:
            for sources in self._choices(model, now_s, num_bytes):
                trial, received = self._send(model, sources, nodes, num_bytes, now_s)
                if not fetched or _last_s(received) < _last_s(fetched):
                    wires, fetched = trial, received
        assert fetched, f"no machine has `{model}`"
        self._wires = wires
        for node, one in fetched.items():
            copy = _Copy(one)
            if self._transfers.host_bytes < math.inf:
                copy.num_bytes = num_bytes
                copy.until_s = math.inf if self._make_room(model, node, num_bytes, now_s) else one.arrived_s
            self._keep_copy(model, node, copy)
            if one.source is None:
                self.bytes_read += num_bytes
            else:
                self.bytes_fetched += num_bytes
        return fetched

    def _read(
        self, nodes: Sequence[NodeId], num_bytes: int, now_s: float
    ) -> tuple[_Wires, dict[NodeId, Fetched]]:
        wires, fetched = self._wires.copy(), dict[NodeId, Fetched]()
        if (bytes_per_s := self._transfers.disk_bytes_per_s) is not None:
            for node in nodes:
                began_s = max(now_s, wires.disk_s.get(node, 0.0))
                seconds = num_bytes / bytes_per_s
                wires.disk_s[node] = began_s + seconds
                parts_s = [began_s + seconds * (at + 1) / self._num_layers for at in range(self._num_layers)]
                fetched[node] = Fetched(None, began_s, tuple(parts_s))
        return wires, fetched

    def _make_room(self, model: ModelId, node: NodeId, num_bytes: int, now_s: float) -> bool:
        """Let other models leave host memory; return whether a copy fits then."""
        if num_bytes > self._transfers.host_bytes:
            return False
        idle = [
            other
            for other, copies in self._copies.items()
            if other != model
            and (copy := copies.get(node)) is not None
            and copy.until_s == math.inf
            and copy.fetched.arrived_s <= now_s
        ]
        # The last one of several that are equally likely to be wanted: machines begin with the busiest.
        idle.sort(key=lambda other: self.demand.probability(other, now_s, HORIZON_S), reverse=True)
        own_bytes, leaving = self.host_bytes_of(model, node, now_s), list[ModelId]()
        lack_bytes = self._host_bytes(node) - own_bytes + num_bytes - self._transfers.host_bytes
        while lack_bytes > 0:
            if not idle:
                return False
            leaving.append(idle.pop())
            lack_bytes -= self._copies[leaving[-1]][node].num_bytes
        for other in leaving:
            del self._copies[other][node]
            self.left.append((other, node))
        return True

    def _keep_copy(self, model: ModelId, node: NodeId, copy: _Copy) -> None:
        self._copies.setdefault(model, {})[node] = copy
        if self._transfers.host_bytes < math.inf:
            self.most_host_bytes = max(self.most_host_bytes, self._host_bytes(node))

    def _host_bytes(self, node: NodeId) -> float:
        copies = [copies[node] for copies in self._copies.values() if node in copies]
        return sum(copy.num_bytes for copy in copies if copy.until_s == math.inf)

    def _choices(self, model: ModelId, now_s: float, num_bytes: int) -> list[list[NodeId]]:
        holders = {
            node: one for node, one in self._holders(model, now_s).items() if one.num_bytes >= num_bytes
        }
        whole = [node for node, one in holders.items() if one.fetched.arrived_s <= now_s]
        idle = [node for node in whole if self._wires.up_s.get(node, 0.0) <= now_s]
        return [idle] if idle else [[node] for node in holders]

    def _send(
        self,
        model: ModelId,
        sources: Sequence[NodeId],
        nodes: Sequence[NodeId],
        num_bytes: int,
        now_s: float,
    ) -> tuple[_Wires, dict[NodeId, Fetched]]:
        wires, transfers = self._wires.copy(), self._transfers
        bytes_per_s = transfers.link_bytes_per_s
        num_parts, ask_s = self._num_layers, SEND_S / self._num_layers  # a lone one asks ahead
        if len(nodes) > 1:
            ask_s = SEND_S
            num_parts = choose_num_parts(
                num_bytes, self._num_layers, len(nodes), bytes_per_s, ask_s, len(sources)
            )
        names = [*sources, *nodes]
        has_s: dict[tuple[NodeId, int], float] = {}
        for source in sources:
            copy = self._copies[model][source]
            for part in range(num_parts):
                has_s[source, part] = copy.fetched.stage_s(part / num_parts, (part + 1) / num_parts)
        first: dict[NodeId, tuple[NodeId, float]] = {}
        send_s = num_bytes / num_parts / bytes_per_s + ask_s
        for send in transfers.schedule(len(sources), len(nodes), num_parts).sends:
            source, target = names[send.source], names[send.target]
            free_s = max(wires.up_s.get(source, 0.0), wires.down_s.get(target, 0.0))
            began_s = max(now_s + transfers.setup_s, free_s, has_s[source, send.part])
            first.setdefault(target, (source, began_s))
            wires.up_s[source] = wires.down_s[target] = has_s[target, send.part] = began_s + send_s
        return wires, {
            node: Fetched(*first[node], tuple(has_s[node, part] for part in range(num_parts)))
            for node in nodes
        }

    def _holders(self, model: ModelId, now_s: float) -> dict[NodeId, _Copy]:
        if model not in self._copies:
            is_origin = self._transfers.is_origin_kept and self._transfers.host_bytes == math.inf
            self._copies[model] = {LOCAL: _Copy(_ALWAYS)} if is_origin else {}
        holders = self._copies[model]
        for node in [node for node, copy in holders.items() if copy.until_s <= now_s]:
            del holders[node]
        return holders


def _last_s(fetched: dict[NodeId, Fetched]) -> float:
    return max(one.arrived_s for one in fetched.values())

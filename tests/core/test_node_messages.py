"""Nodes of the version before understand the head, and it understands them."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import inspect

from hearth.core.messages import Fact, Order
from hearth.core.node_messages import NodeMessage

#: The fields without a default in version 1, of all messages between head and nodes and their parts. Replace
#: them when the head speaks that version no more.
VERSION_1 = {
    "AdapterLoaded": "adapter runs num_bytes rungs wait_s total_s",
    "AdapterOrder": "adapter name where",
    "AdapterUsage": "name base num_bytes num_running num_waiting is_pinned",
    "Admitted": "run num_cached_tokens waited_s",
    "AskSources": "number model",
    "AskTicket": "number node",
    "AuthorityCertificate": "certificate",
    "CancelRequest": "run",
    "ChunkReport": "models",
    "DeviceResidency": "bytes_by_model",
    "DropModel": "model",
    "DropPeer": "node",
    "ForgetAdapter": "adapter",
    "ForgetChunks": "model",
    "GuideSpec": "kind",
    "HeldChunks": "model host disk",
    "HoldModel": "model hold",
    "HostModel": "model hosting where digest weight max_context limits kv_floor_bytes max_kv_bytes eos_ids",
    "HostingFailed": "model hosting label reason",
    "Join": "token_id secret name request",
    "Joined": "certificate",
    "LinkReport": "links",
    "LinkSpeed": "source bytes_per_s latency_s",
    "LoadProgress": "model hosting num_bytes num_layers",
    "MakeSnapshot": "model hosting",
    "Member": "worker begin end",
    "ModelLoaded": "model hosting rungs reused_bytes shared_bytes open_s assemble_s first_layer_s total_s",
    "ModelTurn": "model hosting",
    "ModelUse": "model hold is_hosted weights_bytes total_bytes shared_bytes kv_bytes",
    "NodeHello": "version name kind devices host_bytes port",
    "NodePulse": "workers host_used_bytes",
    "NodeRefused": "reason",
    "NodeWelcome": "node ticket_key engine turns is_encrypted",
    "Ping": "number",
    "Pipeline": "name members num_blocks",
    "Pong": "number budget_bytes free_bytes workspace_bytes lost_bytes moved_bytes fallbacks models",
    "PrepareModel": "model where limits",
    "PromptLogprobs": "num_top logprobs ranks top_ids top_logprobs",
    "QuestionRefused": "number reason",
    "RequestCounts": "num_by_model",
    "RetireModel": "model",
    "RunFailed": "run label reason",
    "RungBytes": "rung num_bytes seconds",
    "SnapshotLooked": "model hosting outcome",
    "SnapshotMade": "model hosting",
    "SnapshotProgress": "model hosting num_done num_steps",
    "Source": "node held",
    "Sources": "number sources",
    "StartRequest": "run model prompt output sampling salt",
    "StepDone": "model runs tokens",
    "StepLimits": "max_batch_tokens max_seqs block_tokens",
    "TicketGranted": "number host port ticket is_encrypted",
    "TokenLogprob": "token_id logprob",
    "TokenLogprobs": "logprob top",
    "Welcome": "proof",
    "WorkerEnded": "reason",
    "WorkerHello": "version worker nonce proof pid kind device budget_bytes shares_workspace",
    "WorkerStatus": "worker state pid num_restarts hello reason",
    "WorkerOpened": "node hello",
}


def parts(of: inspect.Type, seen: set[type]) -> Iterator[inspect.StructType | inspect.DataclassType]:
    if isinstance(of, inspect.StructType | inspect.DataclassType):
        if of.cls in seen:
            return
        seen.add(of.cls)
        yield of
        inner = [field.type for field in of.fields]
    else:
        inner = [*getattr(of, "types", ()), *getattr(of, "item_types", ())]
        inner += [getattr(of, name) for name in ("item_type", "key_type", "value_type") if hasattr(of, name)]
    for one in inner:
        yield from parts(one, seen)


def test_messages_are_changed_by_fields_with_defaults_alone() -> None:
    checked = set()
    for kind in parts(inspect.type_info(NodeMessage | Fact | Order), set()):
        name = kind.cls.__name__
        if name not in VERSION_1:
            continue
        checked.add(name)
        before = set(VERSION_1[name].split())
        required = {field.name for field in kind.fields if field.required}
        assert required <= before, f"{name}: give {required - before} a default: older nodes do not send it"
        gone = before - {field.name for field in kind.fields}
        assert not gone, f"{name}: keep {gone}: older nodes need it"
    assert checked == VERSION_1.keys()

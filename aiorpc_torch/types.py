"""The types of what this library returns, for annotations. Only the library makes them.

async def main(me: aiorpc.types.Worker) -> None: ...
"""

from ._aio.places import Line as Line
from ._batching.collate import Device as Device
from ._batching.policies import Policy as Policy
from ._children.local import LocalWorker as LocalWorker
from ._client.api import Workers as Workers
from ._client.group_call import GroupCall as GroupCall, GroupResults as GroupResults
from ._client.group_map import Items as Items, Mappable as Mappable, MapResults as MapResults
from ._client.named_members import NamedMembers as NamedMembers
from ._client.pool import WorkerRef as WorkerRef
from ._client.proxies import (
    AnyProxy as AnyProxy,
    GroupProxy as GroupProxy,
    RemoteProxy as RemoteProxy,
    SupervisedProxy as SupervisedProxy,
)
from ._client.routes import AnyMember as AnyMember
from ._client.supervised import Supervised as Supervised
from ._node.config import OnFailure as OnFailure
from ._peers.changes import Change as Change
from ._server.exports import Export as Export
from ._torch.devices import DeviceMaps as DeviceMaps
from ._wire.standing import Standing as Standing, Standings as Standings
from ._world.thread import WorkerThread as WorkerThread
from ._world.worker import Worker as Worker
from .errors import RemoteTraceback as RemoteTraceback

__all__ = (
    "AnyMember",
    "AnyProxy",
    "Change",
    "Device",
    "DeviceMaps",
    "Export",
    "GroupCall",
    "GroupProxy",
    "GroupResults",
    "Items",
    "Line",
    "LocalWorker",
    "MapResults",
    "Mappable",
    "NamedMembers",
    "OnFailure",
    "Policy",
    "RemoteProxy",
    "RemoteTraceback",
    "Standing",
    "Standings",
    "Supervised",
    "SupervisedProxy",
    "Worker",
    "WorkerRef",
    "WorkerThread",
    "Workers",
)

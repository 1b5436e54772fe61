"""The types of what this library returns, for annotations. Only the library makes them.

async def main(me: aiorpc.types.Worker) -> None: ...
"""

from ._aio.places import Line
from ._batching.collate import Device
from ._batching.policies import Policy
from ._children.local import LocalWorker
from ._client.api import Workers
from ._client.group_call import GroupCall, GroupResults
from ._client.group_map import Items, Mappable, MapResults
from ._client.named_members import NamedMembers
from ._client.pool import WorkerRef
from ._client.proxies import (
    AnyProxy,
    GroupProxy,
    RemoteProxy,
    SupervisedProxy,
)
from ._client.routes import AnyMember
from ._client.supervised import Supervised
from ._node.config import OnFailure
from ._peers.changes import Change
from ._server.exports import Export
from ._torch.devices import DeviceMaps
from ._wire.where import Standing, Standings
from ._world.thread import WorkerThread
from ._world.worker import Worker
from .errors import RemoteTraceback

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

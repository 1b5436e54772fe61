"""Tables of the tensors of a message that travel outside its bytes, and are not copied."""

from collections.abc import Iterable

import torch
from torch import Tensor

from .._torch.cuda import copy_of
from .._torch.sendable import check_tensor


class TensorTable(list[Tensor]):
    """The tensors of a message that travel outside its bytes.

    torch sends each storage of a message once. So a tensor of several calls, or results, is copied
    for each: what one receiver changes must not change for another.
    """

    _storages: frozenset[int] = frozenset()

    def put(self, tensors: Iterable[Tensor]) -> None:
        """Add the tensors of one call or one result.

        Raises:
            ValueError: if one cannot be copied: its storage was freed since it was encoded.
        """
        own = set()
        for tensor in tensors:
            storage = tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None
            if storage in self._storages:
                check_tensor(tensor)
                self.append(copy_of(tensor))
                continue
            self.append(tensor)
            if storage is not None:
                own.add(storage)
        self._storages |= own

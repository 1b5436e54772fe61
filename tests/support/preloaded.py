"""What children of the forkserver share: the imports of torch's optimizers, 1.5 s in each process.

The server that forks them imports this module.
"""

import torch
import torch.distributed.optim

parameter = torch.nn.Parameter(torch.ones(1))
parameter.grad = torch.ones(1)
torch.optim.SGD([parameter], lr=0.1).step()  # the first step imports the rest

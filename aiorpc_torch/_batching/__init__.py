"""`@batched`: policies, scheduler, queue, collation, results. Usable without a worker."""

"""For tests of your own: a store that fails as programmed, and the contract that every store keeps.

:class:`~remote_ckpt.testing.contract.StoreContract` needs pytest and is imported from its module.
"""

from remote_ckpt.testing.faults import FaultStore, SimulatedCrash, StoreCall, corrupt_reads, raise_at

__all__ = ["FaultStore", "SimulatedCrash", "StoreCall", "corrupt_reads", "raise_at"]

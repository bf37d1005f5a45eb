"""Short messages between ranks outside collectives, from any thread, through the process group's key-value store.

A collective must be called by all ranks in the same order, so a background thread may not call one. The store is a
plain server in rank 0 (TCPStore), where the order is free. Messages are JSON.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore  # torch.distributed exports it, but not to type checkers

_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.001, 0.05


class Mail:
    """Mailbox of the ranks for one purpose. Neither method is collective."""

    def __init__(self, purpose: str) -> None:
        # No public function returns the default store; torch's own elastic and FSDP parts take it from here too.
        self._store = PrefixStore(f"hpc_trainer/{purpose}", dist.distributed_c10d._get_default_store())

    def send(self, key: str, value: Any) -> None:
        """Store `value` (JSON) under `key`, which must be new."""
        self._store.set(key, json.dumps(value))

    def take(self, keys: list[str]) -> list[Any]:
        """Wait until all keys exist, remove them, and return their values. Waits for ever for a rank that has died.

        This method polls, because waiting in the store would block every other thread of this rank.
        """
        pause_s = _SHORTEST_POLL_S
        while not self._store.check(keys):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)
        values = [json.loads(self._store.get(key)) for key in keys]
        for key in keys:
            self._store.delete_key(key)
        return values

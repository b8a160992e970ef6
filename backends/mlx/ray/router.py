"""`PrefixRouter`: sends a request to the replica that holds the beginning of its prompt in the KV cache."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .prefix import PrefixTable


class PrefixRouter(RequestRouter):
    """Routes by the keyword argument `digests` of a request, which `prefix_digests` returns."""

    def initialize_state(self, rows: int) -> None:
        """Create the table of prompts. `rows` is the number of requests that run at once in a replica."""
        self._rows, self._table = rows, PrefixTable(rows)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which the request should try them, each in a list of its own."""
        if pending_request is not None:
            # The result has all replicas. If none of them takes the request, the router waits before it tries again.
            pending_request.routing_context.should_backoff = True
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        self._table.keep(by_id)
        loads = {id: self.replica_queue_len_cache.get(id) or 0 for id in by_id}
        return [[by_id[id]] for id in self._table.rank(_digests(pending_request), loads, max_imbalance=self._rows)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        if digests := _digests(pending_request):
            self._table.add(replica_id, digests)


def _digests(pending_request: PendingRequest | None) -> list[bytes]:
    return [] if pending_request is None else pending_request.kwargs.get("digests") or []

"""What this process remembers of requests after they ended: whose they were, and what each tenant has used. Bounded.

An owner is a tenant as the API key says it, never a name that a request gives itself: one owner's requests and sums
are not shown to another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from headway.engine.client import Output

MOST_REQUESTS = 4096
MOST_OWNERS = 1024


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """One HTTP request: the engine's ids of its answers."""

    name: str  # the response's id
    request_id: str  # as in the header x-request-id
    owner: str
    ids: Sequence[int]


@dataclass(slots=True)
class UsageSums:
    """What the requests of one owner used since the server started."""

    requests: int = 0
    answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    device_seconds: float = 0.0
    kv_block_seconds: float = 0.0
    finished: dict[str, int] = field(default_factory=dict)  # answers by finish reason

    def add(self, num_prompt: int | None, num_output: int, output: Output) -> None:
        """One answer has ended; None: its prompt is counted with another answer to it."""
        finish = output.finish or "error"
        self.answers += 1
        if num_prompt is not None:
            self.prompt_tokens += num_prompt
            self.cached_tokens += output.cached_tokens
        self.completion_tokens += num_output
        self.recomputed_tokens += output.tokens_recomputed
        self.preemptions += output.preemptions
        self.device_seconds += output.device_s
        self.kv_block_seconds += output.kv_block_s
        self.finished[finish] = self.finished.get(finish, 0) + 1


class History:
    """The last `MOST_REQUESTS` requests by either name, and the sums of the last `MOST_OWNERS` owners."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, ServedRequest] = OrderedDict()
        self._names: dict[tuple[str, str], str] = {}  # (owner, x-request-id) -> name of the last one
        self._usage: OrderedDict[str, UsageSums] = OrderedDict()

    def begin(self, request: ServedRequest) -> None:
        """The engine has it now."""
        self._requests[request.name] = request
        self._names[request.owner, request.request_id] = request.name
        self.usage(request.owner).requests += 1
        if len(self._requests) > MOST_REQUESTS:
            _, oldest = self._requests.popitem(last=False)
            if self._names.get((oldest.owner, oldest.request_id)) == oldest.name:
                del self._names[oldest.owner, oldest.request_id]

    def find(self, name: str, owner: str) -> ServedRequest | None:
        """An owner's own request, by the response's id or the request id; of several with one request id the last."""
        found = self._requests.get(self._names.get((owner, name), name))
        return found if found is not None and found.owner == owner else None

    def usage(self, owner: str) -> UsageSums:
        """The sums of an owner, to add to or to show."""
        sums = self._usage.get(owner)
        if sums is None:
            sums = self._usage[owner] = UsageSums()
            if len(self._usage) > MOST_OWNERS:
                self._usage.popitem(last=False)
        self._usage.move_to_end(owner)
        return sums

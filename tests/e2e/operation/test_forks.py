"""A router starts processes beside gRPC's threads: every one starts, without warnings."""

import asyncio

from tests.support.running_cluster import running

ASKED = {"prompt": "a", "max_tokens": 5, "structured_outputs": {"regex": "[a-z]+"}}
VOTE = {"prompt": "a", "max_tokens": 5, "n": 2, "vote": True, "vote_pattern": "[a-z]+"}


async def test_router_forking_sandboxes_logs_no_grpc_warning():
    async with running(prefill__replicas=0, decode__replicas=1) as cluster:
        answers = await asyncio.gather(*(cluster.http.post("/v1/completions", json=body) for body in (ASKED, VOTE) * 4))
        assert [answer.status_code for answer in answers] == [200] * 8
    assert not [line for line in cluster.logs.lines if "fork" in line or "failed to start" in line]

"""`python -m worker.rank …`: a rank whose part of the KV pool no other process can map, and which therefore moves it
itself, as rank 0 orders."""

from typing import TYPE_CHECKING

from engine.distributed.ranks.command_line import exit_process, run_rank

if TYPE_CHECKING:
    from engine.distributed.ranks.follower import ServeRegion


def _load_region_server() -> "ServeRegion":
    from worker.kv_exchange.pool_region import serve_region

    return serve_region


if __name__ == "__main__":
    exit_process(run_rank(str(__package__), _load_region_server))

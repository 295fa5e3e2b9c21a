"""`python -m` this package `--parent-pid P …`: one rank of a worker, started by rank 0 or by its node's starter."""

from engine.distributed.ranks.command_line import exit_process, run_rank

if __name__ == "__main__":
    exit_process(run_rank(str(__package__)))

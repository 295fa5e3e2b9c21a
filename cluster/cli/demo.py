"""`tandem demo`: a cluster on free ports; a long question through both pools, and the same again from the cache."""

from pathlib import Path

from rich.console import Console
from rich.text import Text

from cluster.cli import banner
from cluster.cli.up import EXIT_FAILED, run_with
from cluster.processes.effective_config import resolve_model
from cluster.processes.local_cluster import LocalCluster
from cluster.router_client import ChatClient, ClientError
from cluster.terminal_text import without_controls
from tandem.config.cluster import ClusterConfig, RouterConfig
from tandem.errors import ConfigError
from tandem.rpc.certificates import client_of

MAX_TOKENS = 32
NEEDLE = "The code of amber is 4821."
QUESTION = "What is the code of amber?"
STORY = f"""\
Once upon a time there was a little fox named Lily. Every day Lily walked to the valley to see Ben. Lily had a red \
kite and was very proud of it. The code of willow is 7305. One morning, Lily lost the red kite in the meadow. "Where \
is my kite?" asked Lily. "I will help you," said Ben. They looked behind the mill and under the old bridge. Lily asked \
the owl, but the owl did not know. {NEEDLE} The two friends walked for three hours through the forest. It was windy \
outside, and the road to the meadow was long. Ben climbed a tall tree and saw something red far away. "Look, a red \
kite!" said Lily. The code of falcon is 1964. Lily sat down, ate some bread and thought about it. The kind owl showed \
them the way. They counted seven steps and stopped near the river. "Do not be afraid," said the owl. At last they \
found the kite near the river. Lily shared the bread with Ben and the owl. The code of silver is 5582. From that day \
on, Lily and the owl were friends. They all ate bread and laughed until the evening. And Lily never lost the kite \
again."""


async def demo(config: ClusterConfig, *, out: Console, err: Console) -> int:
    """Run the whole demo and return the exit code. Raises ConfigError before anything is started."""
    if reason := _no_way_in(config.router):
        raise ConfigError(reason)

    async def body(cluster: LocalCluster) -> int:
        return await talk(cluster, out, err)

    pools = f"{config.prefill.replicas} for prefill, {config.decode.replicas} for decode"
    err.print(
        Text(f"Starting a cluster on this machine ({pools}, and a router), then asking one question twice."),
        soft_wrap=True,
    )
    without_standby = config.model_copy(update={"standby_workers": 0})  # the demo is over before one could be useful
    return await run_with(resolve_model(without_standby), body, console=err, show_logs=False)


def _no_way_in(router: RouterConfig) -> str | None:
    """Return why the demo could not access its own cluster, or None."""
    if router.tls is not None and router.tls.client_ca is not None:
        return "router.tls.client_ca: the demo has no client certificate; omit this setting"
    if router.api_keys_file is not None or (router.api_keys and not any(one.is_plain for one in router.api_keys)):
        return "router.api_keys: the demo cannot derive a key from digests; omit this setting"
    return None


async def talk(cluster: LocalCluster, out: Console, err: Console) -> int:
    """Ask the same question twice, and return the exit code."""
    model = banner.model_name(cluster.config, cluster.processes)
    pools = ", ".join(f"{view.worker_id} pid {view.pid}" for view in cluster.workers)
    out.print(Text(f"{model} at {cluster.http_url} · {pools}"), style="dim", soft_wrap=True)
    messages = [{"role": "user", "content": f"{STORY} {QUESTION}"}]
    out.print(Text(f"\nA story of {len(STORY.split())} words contains “{NEEDLE}” The question:"), soft_wrap=True)
    router = cluster.config.router
    api_key = next((one.key.get_secret_value() for one in router.api_keys if one.is_plain), None)
    tls = None if router.tls is None else client_of(Path(router.tls.cert), "router.tls.cert")
    titles = ("through both pools", "again, with the prefix cached")
    try:
        async with ChatClient(cluster.http_url, api_key=api_key, tls=tls) as client:
            for title in titles:
                await _ask(client, messages, model, title, out)
    except ClientError as error:
        err.print(Text(str(error), style="red"), soft_wrap=True)
        return EXIT_FAILED
    hint = "\nNext: `tandem up` starts the same cluster and keeps it running; `tandem chat` talks to it."
    out.print(Text(hint), soft_wrap=True)
    return 0


async def _ask(client: ChatClient, messages: list[dict[str, str]], model: str, title: str, out: Console) -> None:
    out.print(f"\n[bold]> {QUESTION}[/bold]  [dim]({title})[/dim]", soft_wrap=True)

    def print_text(text: str) -> None:
        out.out(without_controls(text), end="", highlight=False)
        out.file.flush()

    answer = await client.chat(messages, print_text, model=model, max_tokens=MAX_TOKENS, temperature=0)
    out.out("")
    out.print(Text(answer.time_line(), style="green"), soft_wrap=True)

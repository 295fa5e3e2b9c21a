"""Which client is installed how, and called how."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.model_path import BUILTIN, BUILTIN_NAME, model_directory
from tandem_bench.peers.environments import PeerEnvironment
from tests.support.engine.pooling_models import PoolingFiles, save_classifier, save_embedder, save_judge

_SCRIPTS = Path(__file__).parent
_SEED = 11
_TOKENIZER = str(model_directory(BUILTIN))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the cluster is, and the client."""

    url: str
    key: str
    python: Path
    folder: Path

    def script(self, name: str) -> list[str]:
        """One of ours, run by the client's interpreter."""
        return [str(self.python), str(_SCRIPTS / name)]

    def tool(self, name: str) -> str:
        """A command that came with the client."""
        return str(self.python.parent / name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A third-party client: where it is installed, and the command that tests it."""

    environment: PeerEnvironment
    command: Callable[[Place], Sequence[str]]
    save: Callable[[Path], None] | None = None
    """Saves the model that is served, which is the built-in one without it."""


def _schemathesis(place: Place) -> list[str]:
    return [
        *(place.tool("schemathesis"), "--config-file", str(_SCRIPTS / "schemathesis.toml")),
        *("run", f"{place.url}/openapi.json", "--header", f"Authorization: Bearer {place.key}"),
        *("--seed", str(_SEED), "--max-examples", "30", "--workers", "1", "--request-timeout", "60"),
        "--continue-on-failure",
    ]


def _aiperf(place: Place) -> list[str]:
    return [
        *(place.tool("aiperf"), "profile", "--model", BUILTIN_NAME, "--url", place.url, "--api-key", place.key),
        *("--endpoint-type", "chat", "--streaming", "--tokenizer", _TOKENIZER, "--ui", "none"),
        *("--request-count", "40", "--concurrency", "4", "--random-seed", str(_SEED)),
        *("--synthetic-input-tokens-mean", "200", "--output-tokens-mean", "32", "--extra-inputs", "ignore_eos:true"),
        *("--artifact-dir", str(place.folder / "aiperf")),
    ]


def _guidellm(place: Place) -> list[str]:
    return [
        *(place.tool("guidellm"), "run", "--disable-progress"),
        *("--backend", f"kind=openai_http,target={place.url},model={BUILTIN_NAME},api_key={place.key}"),
        *("--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=40"),
        *("--tokenizer", f"kind=hf_auto,model={_TOKENIZER}", "--seed", f"kind=static,value={_SEED}"),
        *("--data", "kind=synthetic_text,prompt_tokens=200,output_tokens=32"),
        *("--output", f"kind=json,path={place.folder / 'guidellm.json'}"),
    ]


def _environment(name: str, *packages: str) -> PeerEnvironment:
    return PeerEnvironment(name=f"client-{name}", steps=(packages,))


def _with_pooling(folder: Path) -> None:
    files = PoolingFiles(
        modes=("max", "mean", "lasttoken"), includes_prompt=False, dense=((48, "Tanh"), (32, "Identity"))
    )
    save_embedder(folder, files)


_SENTENCE_TRANSFORMERS = PeerEnvironment(
    name="client-sentence-transformers", steps=(("torch==2.13.0",), ("torch==2.13.0", "sentence-transformers==6.2.*"))
)


def _sentence_transformers(save: Callable[[Path], None], what: str) -> Suite:
    return Suite(
        environment=_SENTENCE_TRANSFORMERS,
        command=lambda place: [*place.script("sentence_transformers_suite.py"), what],
        save=save,
    )


SUITES: Mapping[str, Suite] = {
    "openai": Suite(
        environment=_environment("openai", "openai==3.52.*"), command=lambda place: place.script("openai_suite.py")
    ),
    "anthropic": Suite(
        environment=_environment("anthropic", "anthropic==2.12.*"),
        command=lambda place: place.script("anthropic_suite.py"),
    ),
    "litellm": Suite(
        environment=_environment("litellm", "litellm"), command=lambda place: place.script("litellm_suite.py")
    ),
    "langchain": Suite(
        environment=_environment("langchain", "langchain-openai"),
        command=lambda place: place.script("langchain_suite.py"),
    ),
    "st-last-token": _sentence_transformers(lambda folder: save_embedder(folder, PoolingFiles()), "embeddings"),
    "st-dense": _sentence_transformers(_with_pooling, "embeddings"),
    "st-judge": _sentence_transformers(save_judge, "scores"),
    "st-classifier": _sentence_transformers(save_classifier, "scores"),
    "schemathesis": Suite(environment=_environment("schemathesis", "schemathesis==4.32.*"), command=_schemathesis),
    "aiperf": Suite(environment=_environment("aiperf", "aiperf==0.13.*"), command=_aiperf),
    "guidellm": Suite(environment=_environment("guidellm", "guidellm==0.8.1"), command=_guidellm),
}

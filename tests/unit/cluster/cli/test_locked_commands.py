"""API keys on the command line, warnings in the banner, and a chat client over TLS."""

import http.server
import ssl
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.cli import banner
from cluster.cli.demo import demo
from cluster.cli.main import app
from cluster.cli.up import serve
from cluster.doctor.checks import locks
from cluster.doctor.findings import Status
from cluster.router_client import ChatClient, ClientError, client_tls
from router.access.api_keys import ApiKeyStore
from tandem.config.cluster import ClusterConfig, RouterConfig
from tandem.config.source.yaml_file import PlainLoader
from tandem.errors import ConfigError
from tests.support.certificates import Authority
from tests.support.http_server import answering


def test_key_new_prints_usable_key_and_entry() -> None:
    result = CliRunner().invoke(app, ["key", "new", "--tenant", "acme"])
    assert result.exit_code == 0
    key, entry = (line.partition("): ")[2] for line in result.stdout.splitlines())
    assert key not in entry
    # As it would stand in a file.
    config = RouterConfig(api_keys=[PlainLoader(entry).get_single_data()])
    assert ApiKeyStore(config.api_keys).tenant(f"Bearer {key}") == "acme"
    again = CliRunner().invoke(app, ["key", "digest", "--tenant", "acme"], input=f"{key}\n")
    assert again.stdout.strip() == entry
    raised = CliRunner().invoke(app, ["key", "digest", "--operator"], input=f"{key}\n")
    config = RouterConfig(api_keys=[PlainLoader(raised.stdout).get_single_data()])
    assert ApiKeyStore(config.api_keys).authenticate({"authorization": f"Bearer {key}"}).operator


@pytest.mark.parametrize(
    ("arguments", "given"), [(["digest"], "two words"), (["digest"], ""), (["new", "--tenant", "a b"], "")]
)
def test_key_invalid_key_or_tenant_gets_no_entry(arguments: list[str], given: str) -> None:
    result = CliRunner().invoke(app, ["key", *arguments], input=f"{given}\n")
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith("tenant: " if "--tenant" in arguments else "key: ")
    assert "sha256" not in result.stdout


def test_banner_warns_of_open_or_unencrypted_server() -> None:
    def warned(**router: object) -> list[str]:
        return banner.warnings(ClusterConfig(router=router))

    digest = "sha256:" + 64 * "0"
    assert warned() == warned(api_keys=[digest]) == []
    assert "contains plain-text keys" in warned(api_keys=["plain"])[0]
    assert "everyone who can reach 0.0.0.0" in warned(host="0.0.0.0", allow_open=True)[0]
    assert "is not encrypted" in warned(host="10.0.0.1", api_keys=[digest])[0]
    assert warned(host="10.0.0.1", api_keys=[digest], tls={"cert": "c", "key": "k"}) == []
    assert warned(host="::1") == warned(host="localhost") == []


def test_banner_shows_https_and_client_certificate() -> None:
    config = ClusterConfig(router={"tls": {"cert": "c", "key": "k", "client_ca": "a"}})
    assert banner.curl_line(config, "m").startswith("curl -N https://127.0.0.1:8000/v1/chat/completions ")
    assert "--cacert ca.pem --cert client.pem" in banner.curl_line(config, "m")


def test_doctor_checks_tls_files_and_keys_file(tmp_path: Path) -> None:
    files = Authority().issue(tmp_path, name="127.0.0.1")
    good = {"cert": str(files.cert), "key": str(files.key)}
    assert [one.status for one in locks(ClusterConfig(router={"tls": good}))] == [Status.OK]
    bad = locks(ClusterConfig(router={"tls": good | {"key": str(files.ca)}}))
    assert [one.status for one in bad] == [Status.FAIL]
    assert "router.tls.key" in bad[0].detail
    absent = locks(ClusterConfig(router={"api_keys_file": str(tmp_path / "none")}))
    assert [one.status for one in absent] == [Status.FAIL]


@pytest.mark.parametrize(
    "router",
    [
        {"tls": {"cert": "c", "key": "k", "client_ca": "a"}},
        {"api_keys": ["sha256:" + 64 * "0"]},
        {"api_keys_file": "f"},
    ],
)
async def test_demo_without_credentials_is_refused(router: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"the demo (has no|cannot)"):
        await demo(ClusterConfig(router=router), out=None, err=None)  # type: ignore[arg-type]


async def test_chat_client_trusts_only_given_ca(tmp_path: Path) -> None:
    files = Authority().issue(tmp_path, name="127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)

    class Models(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'{"data": [{"id": "m"}]}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Write no access log to standard error."""

    with answering(Models, context) as url:
        async with ChatClient(url, tls=client_tls(files.ca, None)) as client:
            assert (await client.model()).name == "m"
        async with ChatClient(url) as client:
            with pytest.raises(ClientError, match="--ca"):
                await client.model()
    with pytest.raises(ClientError, match="cannot be used for TLS"):
        client_tls(files.key, None)


async def test_up_missing_keys_file_fails_before_start(tmp_path: Path) -> None:
    config = ClusterConfig(model={"path": "/nowhere"}, router={"api_keys_file": str(tmp_path / "none")})
    with pytest.raises(ConfigError, match=r"^router\.api_keys_file: .*/none: No such file or directory$"):
        await serve(config, out=Console(), err=Console())

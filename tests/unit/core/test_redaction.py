# SPDX-License-Identifier: Apache-2.0
"""Secrets in commands and texts are hidden, and a text of any length is read in a time that grows with its length."""

from __future__ import annotations

import shlex
import time

import pytest

from pytest_nixl.core.redaction import HIDDEN, MOST_COMMAND, hide_command, hider, recorded, redact, redact_value
from pytest_nixl.host.facts import read_environment
from pytest_nixl.host.recorded_tree import FactsRoot
from pytest_nixl.store.provenance import gather


def test_secrets_of_a_command_are_hidden() -> None:
    assert hide_command("env API_TOKEN=abcd UCX_TLS=tcp curl http://me:pw@host/") == (
        "env 'API_TOKEN=***' UCX_TLS=tcp curl 'http://***@host/'"
    )
    assert hide_command("env 'API_TOKEN=abcd") == HIDDEN


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("AccountKey", "c2VjcmV0IQ=="),
        ("accountkey", "c2VjcmV0IQ=="),
        ("SharedAccessSignature", "sv=2022-11-02&ss=b&sig=c2VjcmV0IQ%3D%3D"),
    ],
)
def test_the_key_of_an_azure_account_is_hidden_whole_and_alone(kind: str, key: str) -> None:
    connection = f"DefaultEndpointsProtocol=https;AccountName=me;{kind}={key};BlobEndpoint=http://host/me;"
    name = "AZURE_STORAGE_CONNECTION_STRING"
    assert redact_value(name, connection) == HIDDEN
    hide = hider({name: connection})
    assert hide(f"it is {connection}") == f"it is {HIDDEN}"
    assert hide(f"the key {key} is wrong") == f"the key {HIDDEN} is wrong"
    assert "c2VjcmV0IQ" not in redact(connection)
    assert "AccountName=me" in redact(connection)


def test_a_command_that_is_too_long_is_hidden_without_being_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = "x" * MOST_COMMAND
    assert hide_command(longest) == longest

    def refuse(_: str) -> list[str]:
        raise AssertionError("a command without a bound was taken apart")

    monkeypatch.setattr(shlex, "split", refuse)
    assert hide_command("env API_TOKEN=abcd " + longest) == HIDDEN


def test_a_long_word_is_searched_once() -> None:
    """With a search that starts again at each character this would take minutes."""
    text = "a" * (256 << 10)
    assert redact(text) == text
    assert redact(f"{text}://me:pw@host").endswith("***@host")


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("x@y " + "a://" * 16384, "***@y " + "a://" * 16384),
        (",a:" * 16384 + " x@y", ",a:" * 16384 + " ***@y"),
    ],
    ids=["urls", "users"],
)
def test_many_beginnings_of_urls_are_searched_only_as_far_as_an_at_sign(text: str, hidden: str) -> None:
    # Otherwise each of them takes more than half a minute.
    assert redact(text) == hidden


@pytest.mark.parametrize("length", [1, 64, 65, 500])
def test_the_length_of_a_scheme_does_not_show_a_password(length: int) -> None:
    assert "hunter2" not in redact(f"see {'s' * length}://me:hunter2@host")
    assert "hunter2" not in redact(f"{'s' * length}://me:hunter2@host")


#: Texts as variables, options, answers of servers and tracebacks have them. Each has the secret ``Sw0rdfish-1`` once.
SHAPES = (
    "secret=Sw0rdfish-1",
    "jwt: Sw0rdfish-1",
    "/object?sig=Sw0rdfish-1",
    "/object?x-amz-date=Sw0rdfish-1",
    "credential=Sw0rdfish-1",
    "AUTH=Sw0rdfish-1",
    "curl --proxy-user me:Sw0rdfish-1 h",
    # Python's regular expressions take the long s for an s.
    "pa\u017f\u017fword=Sw0rdfish-1",
    "NIXL_APITOKEN=Sw0rdfish-1",
    "NIXL_DBPASSWORD=Sw0rdfish-1 rank 3",
    "AccountName=me;AccountKey=Sw0rdfish-1;EndpointSuffix=core",
    "http://host:9090/metrics?token=Sw0rdfish-1&format=text",
    "GET / HTTP/1.1\nAuthorization: Bearer Sw0rdfish-1\nHost: h",
    "headers={'Authorization': 'Basic Sw0rdfish-1'}",
    "the server refuses bearer Sw0rdfish-1",
    '{"user": "me", "password": "Sw0rdfish-1"}',
    '{"text": "{\\"password\\": \\"Sw0rdfish-1 and more\\"}"}',
    "password: Sw0rdfish-1",
    "user: me\n  api_key: Sw0rdfish-1\nhost: h",
    "docker run --password Sw0rdfish-1 image",
    "docker run --registry-token=Sw0rdfish-1 image",
    "prefix = ('docker', 'run', '--password', 'Sw0rdfish-1', 'image')",
    'argv: ["login", "--password", "Sw0rdfish-1"]',
    "password='Sw0rdfish-1 with a space'",
)


@pytest.mark.parametrize("text", SHAPES)
def test_a_secret_is_hidden_by_its_shape(text: str) -> None:
    hidden = redact(text)
    assert "Sw0rdfish" not in hidden
    assert HIDDEN in hidden
    assert redact(hidden) == hidden


@pytest.mark.parametrize(
    "repeated",
    [
        "password ", "--pass-", '"password":', '"a', "authorization:", "-", "token=' ", "bearer ", "-u ", "pass=",
        "pwd='", "cookie:", "basic ", "eyJ.", "-----BEGIN PRIVATE KEY-----", "['token', '", "token=;", "hf_",
    ],
)  # fmt: skip
def test_many_beginnings_of_secrets_take_time_that_grows_with_the_length(repeated: str) -> None:
    """A search that starts again at each of them takes 64 times as long for a text of 8 times the length."""

    def seconds(count: int) -> float:
        start = time.process_time()
        redact(repeated * count)
        return time.process_time() - start

    assert seconds(1 << 13) < 24 * seconds(1 << 10) + 0.1


ORDINARY = """
    UCX_RC_VERBS_PKEY X_RKEYS X_LKEY BYPASS COMPASS UCX_TLS UCX_KEEPALIVE_INTERVAL PWD OLDPWD USER FI_MR_CACHE_MONITOR
    NIXL_PLUGIN_DIR
"""


@pytest.mark.parametrize("name", ORDINARY.split())
def test_a_variable_whose_name_only_resembles_a_secret_is_shown(name: str) -> None:
    assert redact_value(name, "Sw0rdfish-1") == "Sw0rdfish-1"


def test_a_variable_is_recorded_if_its_name_is_known_or_its_value_is_a_number_or_a_switch() -> None:
    assert recorded("UCX_TLS", "rc,sm") == "rc,sm"
    assert recorded("UCX_RC_MLX5_PATH_MTU", "auto4k-x") == "auto4k-x"
    assert recorded("NIXL_ETCD_ENDPOINTS", "http://me:Sw0rdfish-1@h:1") == "http://***@h:1"
    assert [recorded("UCX_OF_TOMORROW", value) for value in ("12", "4KiB", "10ms", "y", "auto", "")] == [
        "12", "4KiB", "10ms", "y", "auto", "",
    ]  # fmt: skip
    for value in ("Sw0rdfish-1", "--password Sw0rdfish-1", "12 Sw0rdfish-1", "y\nSw0rdfish-1"):
        assert recorded("UCX_ARGS", value) == HIDDEN


def test_what_is_written_of_the_variables_hides_unknown_values() -> None:
    environ = {"UCX_TLS": "rc,sm", "UCX_ARGS": "Sw0rdfish-1", "NVIDIA_OF_TOMORROW": "Sw0rdfish-1"}
    expected = {"NVIDIA_OF_TOMORROW": HIDDEN, "UCX_ARGS": HIDDEN, "UCX_TLS": "rc,sm"}
    assert gather("", {}, environ).environment == expected
    assert read_environment(FactsRoot(), environ).steering == expected


def test_the_word_after_a_secret_flag_of_a_command_is_hidden() -> None:
    command = "docker run -e DB_PASS=Sw0rdfish-1 --password 'Sw0rdfish 1' --api-token=Sw0rdfish-1 image --token --tls"
    assert hide_command(command) == "docker run -e 'DB_PASS=***' --password '***' '--api-token=***' image --token --tls"


def test_a_secret_of_an_option_is_hidden_wherever_it_comes_again() -> None:
    hide = hider({}, "IMG docker run --password Sw0rdfish-1 image")
    assert hide("docker: Sw0rdfish-1 is refused") == "docker: *** is refused"
    assert hider({}, "curl -u me:Sw0rdfish-1 h")("curl: Sw0rdfish-1 is refused") == "curl: *** is refused"


@pytest.mark.parametrize(
    ("variables", "secrets"),
    [
        ({"ETCDCTL_USER": "bob:Sw0rd/fish"}, ["bob:Sw0rd/fish", "Sw0rd/fish"]),
        ({"ETCDCTL_USER": "bob:Sw0rd:fish"}, ["bob:Sw0rd:fish", "Sw0rd:fish"]),
        ({"ETCD": "http://bob:Sw0rd:fish@a:1"}, ["bob:Sw0rd:fish", "Sw0rd:fish"]),
        ({"ETCD": "http://bob:Sw0rd%2Ffish@a:1"}, ["bob:Sw0rd%2Ffish", "Sw0rd%2Ffish", "Sw0rd/fish"]),
        ({"ETCD": "http://Sw0rd%2Ffish@a:1"}, ["Sw0rd%2Ffish", "Sw0rd/fish"]),
        ({"ETCD": "http://bob:Sw0rdfish@a:1,http://eve:Dogf1sh@b:1"}, ["Sw0rdfish", "Dogf1sh"]),
        ({"A_TOKEN": "Sw0rdfish", "B_TOKEN": "Sw0rdfish-too"}, ["Sw0rdfish", "Sw0rdfish-too"]),
        ({"B_TOKEN": "Sw0rdfish-too", "A_TOKEN": "fish"}, ["Sw0rdfish-too", "fish"]),
    ],
)
def test_each_form_of_a_secret_of_the_environment_is_hidden_whole(
    variables: dict[str, str], secrets: list[str]
) -> None:
    for hide in (hider(variables), hider({"UCX_TLS": "rc_mlx5", **variables}, "text")):
        assert [hide(f"<{secret}>") for secret in secrets] == [f"<{HIDDEN}>"] * len(secrets)
        assert hide("jwt=another over rc_mlx5") == f"jwt={HIDDEN} over rc_mlx5"


def test_a_word_that_is_too_short_or_common_is_not_hidden_wherever_it_comes_again() -> None:
    words = "abc true false none null auto root default enabled disabled"
    variables = {f"TOKEN_{number}_KEY": word for number, word in enumerate(words.split())}
    assert hider({**variables, "ETCD": "http://root:@h"})(words) == words
